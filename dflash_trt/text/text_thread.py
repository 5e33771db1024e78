"""Tokenize texts outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_trt.errors import DFlashError

T = TypeVar("T")

LONG = 4097  # characters: a shorter text is tokenized faster than handed to a thread


class TextThread:
    """One thread that tokenizes long texts in order of arrival. `Tokenizer` releases the GIL meanwhile.

    One text at a time limits the memory to the tokens of one text. The thread is faster than prefill.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dflash-trt texts")
        self._closed = False

    async def run(self, work: Callable[[], T], *, size: int, timeout: float | None = None) -> T:
        """The result of `work` on a text of this size. Raises TimeoutError if it takes over `timeout` seconds.

        A cancelled or timed-out task does not wait. Its text is dropped unless the thread is already working on it.
        """
        if size < LONG:
            return work()
        kept = [work]

        def next_text() -> T:
            if self._closed:
                raise _closed()
            return kept.pop()()

        try:
            done = self._executor.submit(next_text)
        except RuntimeError as error:  # another thread closed it meanwhile
            raise _closed() from error
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.wrap_future(done)
        finally:
            kept.clear()

    def close(self) -> None:
        """Accept no more work and refuse the waiting work."""
        self._closed = True
        self._executor.shutdown(wait=False)


def _closed() -> DFlashError:
    return DFlashError("this AsyncLLM is closed; open the bundle again")
