"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.generation import AnswerChoice, Generation, engine_request
from dflash_trt.serving.openai.model import Model, completion_logprobs
from dflash_trt.serving.openai.protocol import CompletionRequest
from dflash_trt.serving.openai.structure import form_of, names_of
from dflash_trt.serving.wire import Update

_DEFAULT_TOKENS = 16  # OpenAI's


@dataclass
class CompletionChoice(AnswerChoice):
    """One choice of a completion so far.

    offset: characters of the tokens that log-probabilities were given for.
    """

    offset: int = 0
    texts: list[str] = field(default_factory=list)


@dataclass
class Completions(Generation[CompletionRequest, CompletionChoice]):
    """Prompts that are ready to be completed."""

    kind = chunk_kind = "text_completion"

    @classmethod
    async def of(
        cls, model: Model, body: CompletionRequest, request_id: str, most_seconds: float | None
    ) -> Completions:
        """Tokenize the prompts. Raises ApiError."""
        model.check_name(body.model)
        tokens = body.max_tokens
        prompts = []
        for prompt in body.prompt:
            special = body.add_special_tokens is not False
            ids = await model.encode(prompt, special=special) if isinstance(prompt, str) else prompt
            if not ids:
                raise ApiError(400, "the prompt is empty: give at least one token", "prompt")
            prompts.append(ids)  # the engine checks those that were given
            await asyncio.sleep(0)  # a short text is tokenized in the event loop, and there may be hundreds
        if tokens is None:
            room = model.max_seq_len - max(map(len, prompts), default=0)
            tokens = max(1, min(_DEFAULT_TOKENS, room))
        more: dict[str, Any] = {}
        if body.logprobs is not None:
            more = {"logprobs": True, "top_logprobs": body.logprobs, "prompt_logprobs": bool(body.echo)}
        if (form := form_of(body)) is not None:
            more["structured_outputs"] = form
        # With max_tokens 0 the prompt alone is echoed. The engine's least is one token, which is dropped.
        least = 1 if body.echo and tokens == 0 else tokens
        request = engine_request(model, body, prompts, max_tokens=least, more=more, most_seconds=most_seconds)
        choices = [CompletionChoice() for _ in range(len(prompts) * request["n"])]
        return cls(model, body, f"cmpl-{request_id}", request, prompts, choices, names_of(body))

    def take(self, index: int, update: Update) -> None:
        """Count an update of a choice. Where only the prompt is asked for, its token is dropped."""
        if self.body.echo and self.body.max_tokens == 0:
            update |= {"text": "", "token_ids": []}
            if "logprobs" in update:
                update |= {"logprobs": [], "top_logprobs": []}
            if "finish_reason" in update:
                update["finish_reason"] = "length"
        super().take(index, update)

    def add(self, index: int, update: Update) -> None:
        fields = self._choice(index, update)
        self.choices[index].texts.append(fields["text"])
        self.choices[index].note(fields["logprobs"])

    def content(self, index: int) -> dict[str, Any]:
        at = index // self.request["n"]
        fields = {"text": "".join(self.choices[index].texts)} | self.of_prompts.get(at, {})
        return fields | ({"prompt_token_ids": self.prompts[at]} if self.body.return_token_ids else {})

    def deltas(self, index: int, update: Update) -> Iterator[dict[str, Any]]:
        yield self.chunk(self._choice(index, update))

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        """What an update adds to a choice. The first one has the echo."""
        choice = self.choices[index]
        text = update["text"] if choice.begun else self._echo(index) + update["text"]
        choice.begun = True
        fields: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": None,
        }
        if self.body.logprobs is not None:
            echoed = self.body.echo and "prompt_logprobs" in update
            prompt = self.prompts[index // self.request["n"]] if echoed else []
            most = self.body.logprobs
            fields["logprobs"] = completion_logprobs(self.model, prompt, update, choice.offset, most)
            choice.offset += sum(map(len, fields["logprobs"]["tokens"]))
        if self.body.return_token_ids:
            fields["token_ids"] = update["token_ids"]
        return fields

    def _echo(self, index: int) -> str:
        if not self.body.echo:
            return ""
        at = index // self.request["n"]
        prompt, ids = self.body.prompt[at], self.prompts[at]
        return (
            prompt if isinstance(prompt, str) else self.model.tokenizer.decode(ids, skip_special_tokens=False)
        )
