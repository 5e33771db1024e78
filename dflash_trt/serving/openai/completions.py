"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.serving.openai.engine import EngineProcess
from dflash_trt.serving.openai.errors import ApiError, refused
from dflash_trt.serving.openai.generation import Generation, prepare, shortened, updates
from dflash_trt.serving.openai.logprobs import of_completion
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import CompletionRequest
from dflash_trt.serving.openai.structure import asked, names
from dflash_trt.serving.wire import Update

_DEFAULT_TOKENS = 16  # OpenAI's
_MOST_PROMPTS = 1024


@dataclass
class _Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # its tokens, where they have log-probabilities, too
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)
    finish_reason: str | None = None
    offset: int = 0


@dataclass
class Completions(Generation[CompletionRequest]):
    """Prompts that are ready to be completed."""

    kind = chunk_kind = "text_completion"
    _reasons: list[str | None] = field(default_factory=list)

    @classmethod
    async def of(
        cls, model: Model, body: CompletionRequest, request_id: str, most_seconds: float | None
    ) -> Completions:
        """Tokenize the prompts. Raises ApiError."""
        model.check_name(body.model)
        tokens = body.max_tokens
        prompts = []
        for prompt in prompts_of(body.prompt):
            prompts.append(shortened(model, body, await _ids(model, prompt, body), tokens))
            await asyncio.sleep(0)  # a short text is tokenized in the event loop, and there may be hundreds
        if tokens is None:
            room = model.max_seq_len - max(map(len, prompts), default=0)
            tokens = max(1, min(_DEFAULT_TOKENS, room))
        more: dict[str, Any] = {}
        if body.logprobs is not None:
            more = {"logprobs": True, "top_logprobs": body.logprobs, "prompt_logprobs": bool(body.echo)}
        if (form := asked(body)) is not None:
            more["structured_outputs"] = form
        # With max_tokens 0 the prompt alone is echoed. The engine's least is one token, which is dropped.
        least = 1 if body.echo and tokens == 0 else tokens
        prepared = prepare(model, body, prompts, max_tokens=least, more=more, most_seconds=most_seconds)
        return cls(model, body, f"cmpl-{request_id}", prepared)

    async def run(self, engine: EngineProcess) -> AsyncGenerator[tuple[int, Update], None]:
        """Index and update of each choice, as they come. Raises ApiError."""
        try:
            drop = self.body.echo and self.body.max_tokens == 0
            async with aclosing(updates(engine, self.prepared)) as given:
                async for index, update in given:
                    if drop:
                        update |= {"text": "", "token_ids": []}
                        if "logprobs" in update:
                            update |= {"logprobs": [], "top_logprobs": []}
                        if "finish_reason" in update:
                            update["finish_reason"] = "length"
                    self.usage.add(update, prompt=index % self.prepared.n == 0)
                    if "finish_reason" in update:
                        self._reasons.append(update["finish_reason"])
                    yield index, update
        except ApiError as error:
            raise error.renamed(names(self.body)) from None

    def _echo(self, index: int) -> tuple[str, list[int]]:
        if not self.body.echo:
            return "", []
        at = index // self.prepared.n
        given, ids = prompts_of(self.body.prompt)[at], self.prepared.prompts[at]
        whole = isinstance(given, str) and self.body.truncate_prompt_tokens is None
        return str(given) if whole else self.model.tokenizer.decode(ids, skip_special_tokens=False), ids

    def reasons(self) -> list[str | None]:
        """The finish reasons of the choices so far."""
        return self._reasons

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return len(self._reasons) == self.prepared.choices

    async def whole(self, engine: EngineProcess) -> dict[str, Any]:
        """The completions at once."""
        choices = [_Choice() for _ in range(self.prepared.choices)]
        async with aclosing(self.run(engine)) as given:
            async for index, update in given:
                self._add(choices[index], index, update)
        listed = []
        for index, choice in enumerate(choices):
            text, ids = self._echo(index)
            made = {"index": index, "text": text + choice.text, "finish_reason": choice.finish_reason}
            made["logprobs"] = self._logprobs(choice) if self.body.logprobs is not None else None
            if self.body.return_token_ids:
                made["token_ids"] = choice.token_ids
                made["prompt_token_ids"] = ids or self.prepared.prompts[index // self.prepared.n]
            listed.append(made)
            await asyncio.sleep(0)  # log-probabilities of a long prompt take their time for each choice
        return self.answer(listed)

    def _add(self, choice: _Choice, index: int, update: Update) -> None:
        if "prompt_logprobs" in update:
            choice.prompt = self.prepared.prompts[index // self.prepared.n]
            choice.logprobs += update["prompt_logprobs"]
            tops = update.get("prompt_top_logprobs") or [[]] * len(choice.prompt)
            choice.tops += [None, *tops[1:]]
        choice.text += update["text"]
        choice.token_ids += update["token_ids"]
        choice.logprobs += update.get("logprobs") or []
        choice.tops += update.get("top_logprobs") or [None] * len(update.get("logprobs") or [])
        choice.finish_reason = update.get("finish_reason", choice.finish_reason)

    def _logprobs(self, choice: _Choice) -> dict[str, Any]:
        ids = [*choice.prompt, *choice.token_ids]
        return of_completion(self.model, ids, choice.logprobs, choice.tops, choice.offset)

    async def chunks(self, engine: EngineProcess) -> AsyncGenerator[dict[str, Any], None]:
        """The completions in chunks."""
        begun, offsets = set[int](), dict[int, int]()
        async with aclosing(self.run(engine)) as given:
            async for index, update in given:
                part = _Choice(offset=offsets.get(index, 0))
                self._add(part, index, update)
                text = part.text
                if index not in begun:
                    begun.add(index)
                    text = self._echo(index)[0] + text
                choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": part.finish_reason}
                choice["logprobs"] = self._logprobs(part) if self.body.logprobs is not None else None
                offsets[index] = part.offset + sum(map(len, (choice["logprobs"] or {}).get("tokens", ())))
                if self.body.return_token_ids:
                    choice["token_ids"] = part.token_ids
                yield self.chunk(choice)
        for chunk in self.last_chunks():
            yield chunk


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts of a request: one text or list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is [], expected a text, token ids, or a list of them", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > _MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(prompt)} texts, expected at most {_MOST_PROMPTS}", "prompt")
    return prompt  # type: ignore[return-value]


async def _ids(model: Model, prompt: str | list[int], body: CompletionRequest) -> list[int]:
    """Token ids of a prompt. The engine checks given ids. Raises ApiError."""
    if not isinstance(prompt, str):
        if not prompt:
            raise ApiError(400, "the prompt is empty: give at least one token", "prompt")
        return prompt
    try:
        any_length = body.truncate_prompt_tokens is not None
        ids = await model.encode(prompt, special=body.add_special_tokens, any_length=any_length)
    except RequestError as error:
        raise refused(error) from None
    if not ids:
        raise ApiError(400, "the prompt is empty: give at least one token", "prompt")
    return ids
