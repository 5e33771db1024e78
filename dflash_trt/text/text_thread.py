"""Work on texts, out of the event loops' way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dflash_trt.errors import DFlashError

T = TypeVar("T")
Text = TypeVar("Text")
Params = TypeVar("Params")

_SHORT = 4096  # characters: handing less to a thread takes longer than tokenizing it


class TextThread:
    """One thread that tokenizes long texts, in the order they come. `tokenizers` lets other threads go on meanwhile.

    One at a time, so that memory is needed for the tokens of one text only. It is faster than prompts are prefilled.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dflash-trt texts")
        self._closed = False

    async def run(
        self,
        work: Callable[[Text, Params], T],
        text: Text,
        params: Params,
        *,
        size: int,
        timeout: float | None,
    ) -> T:
        """The result of `work`; TimeoutError where that took longer than `timeout` seconds.

        A task that is cancelled, or whose time is over, does not wait: its text is dropped, unless it is just being
        worked on.
        """
        if size <= _SHORT:
            return work(text, params)
        kept = [(text, params)]

        def next_text() -> T:
            if self._closed:
                raise _closed()
            return work(*kept.pop())

        try:
            done = self._executor.submit(next_text)
        except RuntimeError as error:  # closed by another thread meanwhile
            raise _closed() from error
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.wrap_future(done)
        finally:
            kept.clear()

    def close(self) -> None:
        """Take no more work, and refuse what waits."""
        self._closed = True
        self._executor.shutdown(wait=False)


def _closed() -> DFlashError:
    return DFlashError("this AsyncLLM is closed; open the bundle again")
