"""The bundle as the API needs it, without an engine: its limits, its tokenizer, its chat template, its defaults."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import CheckpointError, DFlashError, PromptLengthError, RequestError
from dflash_trt.files.reading import read_config
from dflash_trt.serving.openai.errors import ApiError, refused
from dflash_trt.serving.openai.reading import Json
from dflash_trt.serving.openai.written import written_by
from dflash_trt.serving.wire import Update
from dflash_trt.text.tokenizer import TextThread

# Characters that stand for bytes in vocabularies of bytes: printable ones for themselves, the others from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
T = TypeVar("T")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Model:
    """A bundle under the name `name`, and its texts as tokens.

    defaults: what `generation_config.json` says about sampling. Without it, temperature is 1, as in OpenAI's API.
    """

    def __init__(self, bundle: Bundle, name: str | None) -> None:
        self.bundle, manifest = bundle, bundle.manifest
        self.name = name or bundle.path.resolve().name
        self.max_seq_len: int = manifest["max_seq_len"]
        self.block_size: int = manifest["block_size"]
        self.vocab_size: int = manifest["vocab_size"]
        self.tokenizer = engine_of(bundle).tokenizer(bundle)
        self.defaults = sampling_defaults(self.tokenizer.directory / "generation_config.json")
        self.written = written_by(self.tokenizer.chat_source())
        self.tokenizer.templates.prepare()
        self._texts = TextThread()
        self._token_texts: dict[int, str] = {}  # one request may ask for a million of them

    def check_name(self, name: str | None) -> None:
        """Raise ApiError for another model's name."""
        if name is not None and name not in (self.name, f"models/{self.name}"):
            raise ApiError(
                404,
                f"model is {json.dumps(name[:200])}, but this server has {self.name}",
                "model",
                "model_not_found",
            )

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text. Raises ApiError. A thread tokenizes long texts."""
        return await self._run(partial(self._encode, text, special=special), len(text))

    async def _run(self, make: Callable[[], T], size: int) -> T:
        """What `make` gives, on a thread if a text of this size takes long."""
        try:
            return await self._texts.run(make, size=size)
        except PromptLengthError as error:
            raise self.overflow(str(error), "prompt") from None
        except RequestError as error:
            raise refused(error) from None

    def overflow(self, why: str, field: str) -> ApiError:
        """The error of a request that is longer than the context, by the words and the code that clients look for."""
        text = f"this model's maximum context length is {self.max_seq_len} tokens, but {why}"
        return ApiError(400, text, field, "context_length_exceeded")

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special, max_tokens=self.max_seq_len)

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included. Raises ApiError. A thread decodes long lists."""
        if len(ids) > self.max_seq_len:
            raise ApiError(400, f"tokens has {len(ids)} ids, expected at most {self.max_seq_len}", "tokens")
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ApiError(400, f"tokens contains {wrong[0]}, expected 0..{self.vocab_size - 1}", "tokens")
        return await self._run(partial(self.tokenizer.decode, ids, skip_special_tokens=False), len(ids))

    async def chat(
        self,
        read: Callable[[], list[Json]],
        tools: list[Json],
        variables: Json,
        *,
        generation_prompt: bool = True,
        continued: bool = False,
        special: bool = False,
    ) -> tuple[list[int], str, Json]:
        """Token ids and text of a chat by the model's template, and its last message. Raises ApiError.

        read: gives the messages. continued: the text ends with the content of the last message. special: as in
        `encode`.
        """
        most = self.tokenizer.most_bytes(self.max_seq_len) + (1 << 20)

        if "tools" in variables:
            raise ApiError(400, "chat_template_kwargs has tools: send them as tools", "chat_template_kwargs")

        def render() -> tuple[list[int], str, Json]:
            messages = read()
            if not self.written.developer:
                for message in messages:
                    message["role"] = {"developer": "system"}.get(message["role"], message["role"])
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, generation_prompt, tools=tools or None, **variables
                )
            except CheckpointError:
                raise RequestError(
                    "messages cannot be rendered: this model has no working chat template; "
                    "send a prompt to /v1/completions"
                ) from None
            if continued:
                text = text_until(text, messages[-1]["content"])
            return self._encode(text, special=special), text, messages[-1]

        # The renderer is a process of its own, so the event loop must not wait for it.
        return await self._run(render, most)

    def token_text(self, token: int) -> str:
        """A token as text, special tokens included."""
        if (text := self._token_texts.get(token)) is None:
            text = self._token_texts[token] = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes. They may be a part of a character, which its text cannot show."""
        text = self.token_text(token)
        if "\ufffd" not in text:
            return text.encode(errors="replace")
        piece = self.tokenizer.backend.id_to_token(token) or ""
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        with contextlib.suppress(KeyError):
            return bytes(_BYTES[character] for character in piece)
        return text.encode(errors="replace")


def last_end(text: str, part: str) -> int:
    """The index behind the last place of `part`, which is not empty, in `text`; 0: it has none.

    Unlike `str.find`, `str.rfind` may take a time of the product of their lengths.
    """
    start = text[::-1].find(part[::-1])
    return 0 if start < 0 else len(text) - start


def text_until(text: str, content: str) -> str:
    """A rendered chat up to the end of its last message's content. Raises RequestError."""
    for shown in (content, content.strip()):  # templates may strip it
        if shown and (end := last_end(text, shown)):
            return text[:end]
    raise RequestError(
        "continue_final_message is true, but the chat template shows no text of the last message"
    )


def sampling_defaults(path: Path) -> dict[str, Any]:
    """The sampling that a generation_config.json asks for, in fields of requests; what is no number is left out."""
    try:
        fields = read_config(path) if path.is_file() else {}
    except DFlashError:
        fields = {}
    if fields.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {name: fields.get(name) for name in _DEFAULTS}
    return {"temperature": 1.0} | {name: value for name, value in found.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and isfinite(value))


def prompt_logprobs(model: Model, prompt: list[int], update: Update, most: int) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: by id, the token of each place of the prompt and the `most` best ones there."""
    places: list[Json | None] = []
    tops = update.get("prompt_top_logprobs") or [[]] * len(prompt)
    for token, logprob, rank, top in zip(
        prompt, update["prompt_logprobs"], update["prompt_ranks"], tops, strict=True
    ):
        ranked = [(token, logprob, rank), *((*pair, place) for place, pair in enumerate(top[:most], 1))]
        by_id = {
            str(token_id): {
                "logprob": _finite(value),
                "rank": at,
                "decoded_token": model.token_text(token_id),
            }
            for token_id, value, at in ranked
            if value is not None
        }
        places.append(by_id or None)
    return places


def chat_logprobs(model: Model, update: Update, most: int) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice: one entry per token of this update, with the `most` best ones at its place."""
    if update.get("logprobs") is None:
        return None
    tops = update.get("top_logprobs") or [[]] * len(update["logprobs"])
    content = []
    for token, logprob, top in zip(update["token_ids"], update["logprobs"], tops, strict=True):
        entry = _entry(model, token, logprob)
        content.append(entry | {"top_logprobs": [_entry(model, *pair) for pair in top[:most]]})
    return {"content": content, "refusal": None}


def _entry(model: Model, token: int, logprob: float) -> dict[str, Any]:
    text = model.token_text(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(model.token_bytes(token))}


def completion_logprobs(
    model: Model, prompt: list[int], update: Update, offset: int, most: int
) -> dict[str, Any]:
    """`logprobs` of a completion's choice: of an update's tokens, and before them of the prompt's that it is about.

    prompt: the prompt's tokens that belong to its `prompt_logprobs`. offset: characters of the text before all these.
    most: how many of the best ones at each place.
    """
    ids, logprobs = update["token_ids"], list[float | None](update.get("logprobs") or [])
    tops: list[Any] = update.get("top_logprobs") or [None] * len(logprobs)
    if prompt:
        ids, logprobs = [*prompt, *ids], [*update["prompt_logprobs"], *logprobs]
        tops = [*(update.get("prompt_top_logprobs") or [[]] * len(prompt)), *tops]
    texts = [model.token_text(token) for token in ids]
    return {
        "tokens": texts,
        "token_logprobs": [None if value is None else _finite(value) for value in logprobs],
        "top_logprobs": [
            None
            if top is None or logprob is None
            else {model.token_text(token): _finite(value) for token, value in top[:most]}
            for top, logprob in zip(tops, logprobs, strict=True)
        ],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


def _finite(value: float) -> float:
    """JSON has no infinity. -9999 stands for it, as in vLLM."""
    return max(value, -9999.0)
