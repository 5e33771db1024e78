"""The tokenizer of a checkpoint or bundle: text to token ids and back, and the chat template."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from dflash_trt.errors import CheckpointError, DFlashError, PromptLengthError, RequestError
from dflash_trt.files.reading import read_text
from dflash_trt.text.chat_template import ChatTemplates

T = TypeVar("T")

LONG = 4097  # characters: a shorter text is tokenized faster than handed to a thread
TOKENIZER_BYTES = 64 << 20  # the largest published file has 33 MB
# Characters that the normalizers, pre-tokenizers and byte fallbacks of published tokenizers treat differently.
_TRIAL = (
    "Hello, wörld! It's 3.14 e\u0301 ﬁ ½ 漢字 かな 한글 שלום नमस्ते 😀👩\u200d👧 \t\r\n\n  "
    "\x00\x7f\ufeff\u200b\ufffd ▁Ġ #@$%"
)
_TRIAL_IDS = 1000  # decoded per call
_CHARACTERS = 16  # per token, of a text that is tokenized in one call: about four times the usual number


class Tokenizer:
    """`tokenizer.json` of a directory, and its chat template. Raises CheckpointError, naming the file, if one is
    malformed.

    files: names of the files that may be read, as a bundle's manifest lists them; None allows all.
    """

    def __init__(self, directory: Path, files: Container[str] | None = None) -> None:
        self.directory, self._files = directory, files
        path = directory / "tokenizer.json"
        if not path.is_file() or not (files is None or path.name in files):
            raise CheckpointError(f"{path}: not found; a checkpoint needs the tokenizer in this one file")
        text = read_text(path, TOKENIZER_BYTES)
        with _library(CheckpointError, f"{path}: not a readable tokenizer"):
            self.backend = tokenizers.Tokenizer.from_str(text)
            self.backend.no_truncation()
            self.backend.no_padding()

    def check(self) -> None:
        """Try the tokenizer on a text in many scripts and on every id.

        The library reads some files without complaint and panics later. Raises CheckpointError if it panics here. A
        text that cannot be tokenized, such as one in letters without tokens, is an error of its request.
        """
        ids = sorted(self.backend.get_vocab(with_added_tokens=True).values())
        try:
            with suppress(Exception):
                self.backend.encode(_TRIAL)
            for start in range(0, len(ids), _TRIAL_IDS):
                with suppress(Exception):
                    self.backend.decode(ids[start : start + _TRIAL_IDS], skip_special_tokens=False)
        except BaseException as error:
            if not _panicked(error):
                raise
            path = self.directory / "tokenizer.json"
            raise CheckpointError(f"{path}: the tokenizer does not work: {error}") from None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of `text`. Special tokens that are spelled out in the text are recognized.

        add_special_tokens: add the tokens that the tokenizer puts around a text, such as a first BOS. Leave them out
        for the output of a chat template, which contains its own.
        max_tokens: refuse a much longer text with a PromptLengthError before all of it is tokenized. A slightly longer
        text is not refused.
        """
        try:
            with _library(RequestError, "tokenizer.json: the tokenizer fails on this prompt"):
                if max_tokens is not None:
                    self._check_length(text, max_tokens)
                return self._ids(text, add_special_tokens)
        except TypeError as error:  # also for a lone surrogate
            raise RequestError(f"the prompt is {text[:60]!a}, expected a valid Unicode text") from error
        except MemoryError as error:
            raise RequestError(
                f"the prompt has {len(text)} characters: no memory is left for its tokens"
            ) from error

    def _ids(self, text: str, special: bool = False) -> list[int]:
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=special).ids
        # Unlike `encode`, this lets other threads run, and it notes no offsets.
        return self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def most_bytes(self, tokens: int) -> int:
        """An upper bound for the UTF-8 bytes of a text with this many tokens. Spaces around special tokens do not
        count.
        """
        return tokens * self._bytes_per_token

    @cached_property
    def _bytes_per_token(self) -> int:
        longest = max(map(len, map(str.encode, self.backend.get_vocab())), default=1)
        # Normalization shortens a text: NFC up to 3 times, NFKC up to 4 times.
        return longest if self.backend.normalizer is None else 4 * longest

    def _check_length(self, text: str, most: int) -> None:
        size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        if size > most and size > (limit := self.most_bytes(most)):
            raise PromptLengthError(
                f"the prompt has {size} bytes, more than {most} tokens have (at most {limit})"
            )
        piece = _CHARACTERS * max(most, 256)
        if len(text) <= piece:
            return
        count = 0  # in pieces, so that a refused text costs little time and memory
        for start in range(0, len(text), piece):
            count += len(self._ids(text[start : start + piece]))
            if count > 2 * most:  # cutting a word adds a few tokens, but never doubles them
                raise PromptLengthError(
                    f"the prompt has {size} bytes: its beginning alone has over {most} tokens"
                )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Bytes that are not UTF-8 become U+FFFD."""
        with _library(RequestError, "tokenizer.json: the tokenizer fails on these tokens"):
            if len(token_ids) >= LONG:  # unlike `decode`, this lets other threads run
                return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render the prompt text of a chat as Transformers does. Encode it with add_special_tokens=False.

        messages: [{"role": ..., "content": ...}, ...].
        tools: JSON schemas of functions.
        kwargs: further variables of the template, such as `enable_thinking=False`.
        All of them are JSON values.

        Raises:
            RequestError: the messages are malformed, the template refuses them, or rendering exceeds its limits.
            CheckpointError: there is no usable template.
        """
        _check_messages(messages)
        if "messages" in kwargs:
            raise RequestError("messages are given twice: as the argument and as a variable of the template")
        named = self.templates.sources
        name = "tool_use" if tools and "tool_use" in named else "default"
        if name not in named:
            names = f"only {sorted(named)}" if named else "none"
            raise CheckpointError(
                f"{self.directory}: no default chat template (chat_template.jinja, or chat_template in "
                f"tokenizer_config.json; found {names}); give the prompt as text instead"
            )
        variables = {
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
            "tools": tools,
            "documents": documents,
        }
        return self.templates.render(name, variables | {"messages": messages})

    def chat_source(self) -> str:
        """The default chat template as text; "" without one."""
        return self.templates.sources.get("default", "")

    @cached_property
    def templates(self) -> ChatTemplates:
        return ChatTemplates(self.directory, self._files)


class TextThread:
    """One thread, or a few, that tokenize long texts in order of arrival. `Tokenizer` releases the GIL meanwhile.

    One text at a time limits the memory to the tokens of one text. The thread is faster than prefill.
    """

    def __init__(self, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="dflash-trt texts")
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
        import asyncio  # slow to import, and of servers alone

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


@contextmanager
def _library(kind: type[DFlashError], state: str) -> Iterator[None]:
    """Turn errors of the tokenizers library into errors of one class."""
    try:
        yield
    except (DFlashError, TypeError, OverflowError, MemoryError):
        raise  # errors about the arguments are the caller's
    except BaseException as error:
        if isinstance(error, Exception) or _panicked(error):
            raise kind(f"{state}: {error}") from None
        raise


def _panicked(error: BaseException) -> bool:
    """Whether the library's Rust code panicked. The exception's class cannot be imported."""
    return type(error).__name__ == "PanicException"


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f'messages is {messages!r}, expected a list like [{{"role": "user", "content": "..."}}]'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] is {message!r}, expected an object with role and content")
        if not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}].role is {message.get('role')!r}, expected a string")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{i}].content is {content!r}, expected a string")
