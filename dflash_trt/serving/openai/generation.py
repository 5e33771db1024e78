"""From an engine's updates to the choices of an answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from pydantic_core import to_json

from dflash_trt.errors import RequestError
from dflash_trt.serving.openai.engine import EngineDownError, EngineProcess, QueueFullError
from dflash_trt.serving.openai.errors import ApiError, Names, from_engine, refused
from dflash_trt.serving.openai.model import Model, last_end, prompt_logprobs
from dflash_trt.serving.openai.protocol import SamplingFields
from dflash_trt.serving.openai.reading import Json
from dflash_trt.serving.wire import EngineRequest, Update

# Log-probabilities of all answers to a request together: about 100 bytes each in an answer, and as many in the engine.
MOST_LOGPROBS = 1 << 19
MOST_OF_A_PROMPT = 1 << 16  # which come at once, and take 0.1 s to write and to read


def engine_request(
    model: Model,
    body: SamplingFields,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    more: dict[str, Any],
    most_seconds: float | None,
) -> EngineRequest:
    """What the engine gets beside these prompts, which share it. Raises ApiError naming the field."""
    longest = max(map(len, prompts))
    room = model.max_seq_len - longest
    if room < 1:
        text = (
            f"the prompt has {longest}; it may have {model.max_seq_len - 1}, which leave one for the answer"
        )
        raise model.overflow(text, "prompt")
    if max_tokens is not None and max_tokens > room:
        text = f"the prompt has {longest} and max_tokens is {max_tokens}, expected at most {room}"
        raise model.overflow(text, "max_tokens")
    if (tops := body.prompt_logprobs) is not None:
        if body.stream:
            text = f"prompt_logprobs is {tops}, but stream is true: they come with a whole answer"
            raise ApiError(400, text, "prompt_logprobs")
        more |= {"prompt_logprobs": True, "top_logprobs": max(tops, more.get("top_logprobs", 0))}
    most = _most_tokens(body, prompts, more)
    if max_tokens is None:
        max_tokens = min(room, most)
    elif max_tokens > most:
        text = f"answers have {MOST_LOGPROBS} log-probabilities at most; ask for fewer of them, or of tokens"
        raise ApiError(400, f"max_tokens is {max_tokens}, but {text}", "max_tokens")
    return EngineRequest(
        params={**model.defaults, **body.sampling(), **more, "max_tokens": max_tokens},
        n=body.n or 1,
        # So that log-probabilities come by rounds, whatever the client gets.
        stream=bool(body.stream or more.get("logprobs")),
        speculate=body.speculate is not False,
        block_length=body.block_length,
        tree_nodes=body.tree_nodes,
        priority=body.priority or 0,
        logit_bias=[(int(key), bias) for key, bias in (body.logit_bias or {}).items()],
        timeout=min((s for s in (body.timeout, most_seconds) if s is not None), default=None),
    )


def _most_tokens(body: SamplingFields, prompts: list[list[int]], more: Json) -> int:
    """The most tokens of each answer that the log-probabilities, `more` says of what, leave room for. Raises ApiError
    if there is none.
    """
    of_token, field = 1 + more.get("top_logprobs", 0), "logprobs"
    of_prompt, of_answer = (of_token * bool(more.get(name)) for name in ("prompt_logprobs", field))
    if body.prompt_logprobs is not None:
        field = "prompt_logprobs"
    if (size := max(map(len, prompts)) * of_prompt) > MOST_OF_A_PROMPT:
        text = (
            f"the prompt would have {size}, expected at most {MOST_OF_A_PROMPT}; ask for fewer, or shorten it"
        )
        raise ApiError(400, f"{field}: {text}", field)
    left = MOST_LOGPROBS // (body.n or 1) - sum(map(len, prompts)) * of_prompt
    if (most := left // (of_answer * len(prompts) or 1)) < 1:
        raise ApiError(400, f"{field}: answers have {MOST_LOGPROBS} at most; ask for fewer", field)
    return most if of_answer else 2**31 - 1


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event. Those with a type have its name."""
    kind = value.get("type")
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + to_json(value) + b"\n\n"


def cache_salt(key_digest: str, salt: str | None) -> str:
    """A request's salt for the engine, of its API key's digest and its own `cache_salt`: 64 digits, or none."""
    if not key_digest and salt is None:
        return ""
    text = f"{key_digest} {salt or ''}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class Usage:
    """Tokens of a request so far. `drafted`, `accepted`: drafts that were verified, and those that were right.

    details: whether clients see `cached`, which may tell them what other clients have sent.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    reasoning: int | None = None
    details: bool = False
    accepting: list[int] = field(default_factory=list)  # verifications by the number of drafts they accepted

    def add(self, update: Update, *, prompt: bool) -> None:
        """Count an update. `prompt`: whether the prompt of its choice counts, too."""
        self.completion += len(update["token_ids"])
        if "num_input_tokens" in update and prompt:
            self.prompt += update["num_input_tokens"]
        if "finish_reason" in update:
            self.drafted += update["num_draft_tokens"]
            self.accepted += update["num_accepted_tokens"]
            self.accepting = update["acceptance_histogram"]
            if prompt:
                self.cached += update["num_cached_tokens"]

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's usage. `speculation` is ours."""
        details = {} if self.reasoning is None else {"reasoning_tokens": self.reasoning}
        of_prompt = {"prompt_tokens_details": {"cached_tokens": self.cached}} if self.details else {}
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            **of_prompt,
            "completion_tokens_details": details,
            "speculation": {"draft_tokens": self.drafted, "accepted_tokens": self.accepted},
        }

    def speculative_decoding(self, block_size: int) -> dict[str, Any]:
        """The drafts of one ended choice, in the form of vLLM's `metrics.speculative_decoding`."""
        # A tree may have more nodes than its longest path, and the list is as long.
        longest = max((k for k, n in enumerate(self.accepting) if n), default=0)
        counts = (self.accepting + [0] * block_size)[: max(block_size, longest + 1)]
        steps = sum(counts)
        return {
            "mean_acceptance_length": 1 + self.accepted / steps if steps else 1.0,
            "draft_acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "acceptance_histogram": counts,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": len(counts) - 1,
        }


@dataclass
class AnswerChoice:
    """One of the answers to a request, so far.

    answered: whether it has tokens. begun: whether a part was given. latest: its latest tokens, for `stop_reason`.
    logprobs: the lists of its log-probabilities in JSON without their brackets, in pieces, by name.
    """

    answered: bool = False
    begun: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    latest: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[bytes]] = field(default_factory=dict)

    def note(self, logprobs: dict[str, Any] | None) -> None:
        """Keep an update's log-probabilities for the whole answer."""
        for name, values in (logprobs or {}).items():
            pieces = self.logprobs.setdefault(name, [] if values is not None else [b"null"])
            if values:
                pieces += [b","] if pieces else []
                pieces.append(to_json(values)[1:-1])

    def whole(self, fields: dict[str, Any]) -> list[bytes]:
        """The choice in JSON, with its log-probabilities."""
        pieces = [to_json(fields)[:-1], b',"logprobs":']
        for number, (name, parts) in enumerate(self.logprobs.items()):
            listed = parts if parts == [b"null"] else [b"[", *parts, b"]"]
            pieces += [b"," if number else b"{", to_json(name), b":", *listed]
        return [*pieces, b"}}" if self.logprobs else b"null}"]


B = TypeVar("B", bound=SamplingFields)
C = TypeVar("C", bound=AnswerChoice)


@dataclass
class Generation(ABC, Generic[B, C]):
    """A request that is ready to be decoded, its choices, and the frame of its answer.

    request: what its prompts share. Each of them has `request["n"]` choices.
    names: patterns of the engine's names for fields, and the names that the client used.
    """

    kind: ClassVar[str]  # the `object` of the answer
    chunk_kind: ClassVar[str]  # and of each chunk of a stream
    model: Model
    body: B
    id: str
    request: EngineRequest
    prompts: list[list[int]]
    choices: list[C]
    names: Names = ()
    usage: Usage = field(default_factory=Usage)
    created: int = field(default_factory=lambda: int(time.time()))
    of_prompts: dict[int, Json] = field(default_factory=dict)  # `prompt_logprobs`, if asked for, by prompt

    async def run(self, engine: EngineProcess) -> AsyncGenerator[tuple[int, Update], None]:
        """Index and update of every choice, as they come. An error of one choice ends all. Raises ApiError."""
        try:
            async with aclosing(engine.updates(self.request, self.prompts)) as updates:
                async for index, update in updates:
                    if "logprobs" in update or "prompt_logprobs" in update:
                        await asyncio.sleep(0)  # each takes its time
                    if "error" in update:
                        raise from_engine(update["error"])
                    choice = self.choices[index]
                    choice.answered = choice.answered or bool(update["token_ids"])
                    if update.get("finish_reason") == "timeout" and not choice.answered:
                        raise ApiError(504, "the deadline passed before the first token", code="deadline")
                    self.take(index, update)
                    yield index, update
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full") from None
        except EngineDownError as error:
            raise ApiError(503, str(error), code="engine_down") from None
        except RequestError as error:
            raise refused(error).renamed(self.names) from None
        except ApiError as error:
            raise error.renamed(self.names) from None

    def take(self, index: int, update: Update) -> None:
        """Count an update of a choice."""
        self.usage.add(update, prompt=index % self.request["n"] == 0)
        choice, stops = self.choices[index], self._stops
        choice.finish_reason = update.get("finish_reason")
        if stops is not None:
            choice.latest = (choice.latest + update["token_ids"])[-stops[2] :]
            if choice.finish_reason == "stop" and choice.latest:
                choice.stop_reason = self._stop_reason(choice.latest, stops[0], stops[1])

    @cached_property
    def _stops(self) -> tuple[list[str], list[int], int] | None:
        """The request's stop strings and stop tokens, and how many tokens the longest string may have."""
        stop, ids = getattr(self.body, "stop", None) or [], getattr(self.body, "stop_token_ids", None) or []
        return (stop, ids, max(map(len, stop), default=0) + 8) if stop or ids else None

    def _stop_reason(self, latest: list[int], stop: list[str], ids: list[int]) -> int | str | None:
        """The stop token, or the stop string that the last token completes; None for the model's own end."""
        if latest[-1] in ids:
            return latest[-1]
        text, before = (
            self.model.tokenizer.decode(part, skip_special_tokens=False) for part in (latest, latest[:-1])
        )
        ends = [(last_end(text, stop_string), -len(stop_string), stop_string) for stop_string in stop]
        ends = [end for end in ends if end[0] > len(before)]
        return min(ends)[2] if ends else None

    @abstractmethod
    def deltas(self, index: int, update: Update) -> Iterator[Json]:
        """What an update of a choice adds to a stream."""

    def ending(self) -> Iterator[Json]:
        """What a stream has after the last update."""
        return iter(())

    async def chunks(self, engine: EngineProcess) -> AsyncGenerator[Json, None]:
        """The chunks or events of a stream. Raises ApiError."""
        async with aclosing(self.run(engine)) as updates:
            async for index, update in updates:
                for chunk in self.deltas(index, update):
                    yield chunk
        for chunk in self.ending():
            yield chunk

    @abstractmethod
    def add(self, index: int, update: Update) -> None:
        """Keep what the whole answer shows of an update of a choice."""

    @abstractmethod
    def content(self, index: int) -> dict[str, Any]:
        """The text or message of an ended choice."""

    async def whole(self, engine: EngineProcess) -> list[bytes]:
        """The whole answer in JSON, in pieces that are sent one by one."""
        async with aclosing(self.run(engine)) as updates:
            async for index, update in updates:
                self.choices[index].token_ids += update["token_ids"]
                if "prompt_ranks" in update and (most := self.body.prompt_logprobs) is not None:
                    at = index // self.request["n"]
                    # There may be 65,536: a thread, so that the event loop goes on.
                    listed = await asyncio.to_thread(
                        prompt_logprobs, self.model, self.prompts[at], update, most
                    )
                    self.of_prompts[at] = {"prompt_logprobs": listed}
                self.add(index, update)
        pieces = [to_json(self._frame(self.kind))[:-1], b',"choices":']
        for index, choice in enumerate(self.choices):
            fields = {"index": index, **self.content(index), "finish_reason": choice.finish_reason}
            fields["stop_reason"] = choice.stop_reason
            if self.body.return_token_ids:
                fields["token_ids"] = choice.token_ids
            pieces += [b"," if index else b"[", *choice.whole(fields)]
            await asyncio.sleep(0)
        return [*pieces, b"],", to_json(self._totals())[1:]]

    @property
    def ended(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream, with the usage so far where it is asked for."""
        options = self.body.stream_options
        usage = {"usage": self.usage.to_dict()} if options and options.continuous_usage_stats else {}
        return self._frame(self.chunk_kind) | {"choices": [choice]} | usage

    def last_event(self, error: ApiError | None) -> bytes:
        """What ends a stream: the usage where it is asked for, or an error in the middle of it, and the end's mark."""
        options, end = self.body.stream_options, b""
        if error is not None:
            end = event(error.body())
        elif options is not None and options.include_usage:
            end = event(self._frame(self.chunk_kind) | {"choices": []} | self._totals())
        return end + b"data: [DONE]\n\n"

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}

    def _totals(self) -> dict[str, Any]:
        """`usage`, and `metrics` as vLLM has them, of one choice that was drafted for."""
        totals: dict[str, Any] = {"usage": self.usage.to_dict()}
        if len(self.choices) == 1 and self.body.speculate is not False:
            drafts = self.usage.speculative_decoding(self.model.block_size)
            totals["metrics"] = {"speculative_decoding": drafts}
        return totals
