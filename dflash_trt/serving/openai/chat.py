"""POST /v1/chat/completions."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from dflash_trt.decoding.output import Detokenizer
from dflash_trt.errors import RequestError
from dflash_trt.serving.openai import logprobs
from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.engine import EngineProcess
from dflash_trt.serving.openai.errors import ApiError, refused
from dflash_trt.serving.openai.frames import frame_of
from dflash_trt.serving.openai.generation import AnswerChoice, Generation, Prepared, Usage, prepare, shortened
from dflash_trt.serving.openai.model import Model, text_of
from dflash_trt.serving.openai.parsing import AnswerParser, AnswerPart, Stage, Think
from dflash_trt.serving.openai.protocol import ChatRequest, Tool
from dflash_trt.serving.openai.structure import names as form_names
from dflash_trt.serving.openai.structure import of_calls, of_format
from dflash_trt.serving.openai.written import (
    RESPONSE,
    calls_of,
    has_special_marks,
    marks_of_calls,
    thoughts_of,
)
from dflash_trt.serving.wire import Update


@dataclass(kw_only=True)
class ChatChoice(AnswerChoice):
    """One choice of a chat so far.

    one_call: drop calls after the first. echo: the last message's content, with which the answer begins. words: splits
    the text by rounds. calls: how many there have been.
    """

    parser: AnswerParser | Channels
    one_call: bool = False
    echo: str = ""
    words: Detokenizer | None = None
    calls: int = 0

    def rounds(self, update: Update) -> list[dict[str, Any]]:
        """The texts of an update's rounds: of the accepted drafts, and of the target's own token."""
        assert self.words is not None
        made, at = [], 0
        for tokens, accepted, verified in update["rounds"]:
            ids = update["token_ids"][at : at + tokens]
            drafted, own = self.words.push(ids[:accepted]), self.words.push(ids[accepted:])
            counts = {"tokens": tokens, "accepted": accepted, "verified": verified}
            made.append({**counts, "drafted": drafted, "own": own})
            at += tokens
        return made


@dataclass
class Chat(Generation[ChatRequest, ChatChoice]):
    """A chat that is ready to be decoded."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    @classmethod
    async def of(cls, model: Model, body: ChatRequest, request_id: str, most_seconds: float | None) -> Chat:
        """Render and tokenize. Raises ApiError."""
        names: list[tuple[str, str]] = [("^prompt$", "messages")]
        if body.max_completion_tokens is not None and body.max_tokens is None:
            names.append((r"\bmax_tokens\b", "max_completion_tokens"))
        try:
            model.check_name(body.model)
            _check(body)
            prepared, choices = await _prepared(model, body, most_seconds, names)
        except ApiError as error:
            raise error.renamed(names) from None
        return cls(model, body, f"chatcmpl-{request_id}", prepared, choices, names, Usage(reasoning=0))

    def parts(self, index: int, update: Update) -> list[AnswerPart]:
        """The parts of the answer that an update of a choice makes certain."""
        choice, reason = self.choices[index], update.get("finish_reason")
        parts = choice.parser.push(update["text"], update["token_ids"])
        if reason is not None:
            parts += choice.parser.finish(cut=reason != "stop")
        self.usage.reasoning = sum(each.parser.reasoning_tokens for each in self.choices)
        calls = [part for part in parts if part.call]
        if choice.one_call:
            calls = calls[: 1 - choice.calls]
        choice.calls += len(calls)
        if reason == "stop" and choice.calls:
            choice.finish_reason = "tool_calls"
        hidden = () if self.body.include_reasoning else ("reasoning",)
        return [part for part in parts if part.kind not in hidden and (part.call is None or part in calls)]

    async def whole(self, engine: EngineProcess) -> dict[str, Any]:
        """The answer at once."""
        choices: list[dict[str, Any]] = [{} for _ in self.choices]
        async with aclosing(self.run(engine)) as given:
            async for index, update in given:  # one for each choice
                made = {"index": index, "message": self._message(index, self.parts(index, update))}
                made["finish_reason"] = self.choices[index].finish_reason
                made["logprobs"] = logprobs.of_chat(self.model, update)
                if self.body.return_token_ids:
                    made["token_ids"] = update["token_ids"]
                choices[index] = made
        return self.answer(choices)

    def _message(self, index: int, parts: list[AnswerPart]) -> dict[str, Any]:
        content, reasoning = (
            "".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning")
        )
        calls = [part.call.to_dict() for part in parts if part.call]
        content = self.choices[index].echo + content
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    async def chunks(self, engine: EngineProcess) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks."""
        async with aclosing(self.run(engine)) as given:
            async for index, update in given:
                choice = self.choices[index]
                if not choice.begun:
                    choice.begun = True
                    yield self._delta(index, {"role": "assistant", "content": ""})
                    if choice.echo:
                        yield self._delta(index, {"content": choice.echo})
                numbers = itertools.count(choice.calls)
                deltas = [_delta(part, numbers) for part in self.parts(index, update)]
                more = self._beside(choice, update)
                if not deltas and any(more.values()):
                    deltas = [{}]
                for delta in deltas[:-1]:
                    yield self._delta(index, delta)
                for delta in deltas[-1:]:
                    yield self._delta(index, delta, **more)
        for chunk in self.last_chunks():
            yield chunk

    def _beside(self, choice: ChatChoice, update: Update) -> dict[str, Any]:
        """What the last delta of an update has beside its text."""
        more: dict[str, Any] = {"finish_reason": choice.finish_reason}
        more["logprobs"] = logprobs.of_chat(self.model, update)
        if self.body.return_token_ids:
            more["token_ids"] = update["token_ids"]
        if self.body.return_rounds:
            more["rounds"] = choice.rounds(update)
        return more

    def _delta(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.chunk(choice | more)


def _delta(part: AnswerPart, numbers: Iterator[int]) -> dict[str, Any]:
    """A part as a stream gives it. numbers: of the calls."""
    if part.call is not None:
        return {"tool_calls": [{"index": next(numbers), **part.call.to_dict()}]}
    return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}


def _check(body: ChatRequest) -> None:
    """Raise ApiError for fields that exclude each other."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are given, expected one", "max_tokens")
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400, "continue_final_message and add_generation_prompt are true, expected one of them",
            "continue_final_message",
        )  # fmt: skip
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given, but logprobs is not true: set it", "top_logprobs")


async def _prepared(
    model: Model, body: ChatRequest, most_seconds: float | None, names: list[tuple[str, str]]
) -> tuple[Prepared, list[ChatChoice]]:
    """The engine's message, and the choices, without text yet. names: gets the names of the form's fields."""
    template = model.template
    tools = body.tools if body.tools and body.tool_choice != "none" else []
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    ids, text = await _rendered(model, body, tools)
    ids = shortened(model, body, ids, most)
    wanted = of_format(body)
    frame = frame_of(template, model.tokenizer.backend.token_to_id, text[max(text.rfind("<|start|>"), 0) :])
    grammar = of_calls(body, tools, frame, wanted)
    names += form_names(body, "tools" if grammar else "response_format" if body.response_format else "")
    form = grammar or wanted
    last = text_of(body.messages[-1].content)
    # Whether the answer begins within a thought, which its generation prompt or the continued message has begun.
    thoughts = thoughts_of(template)
    thinks = thoughts is not None and (
        thoughts.within(text)
        or (bool(body.continue_final_message) and last.rfind(thoughts.begin) > last.rfind(thoughts.end))
    )
    if form is not None and (begin := _begin(template, text, thinks, calls=grammar is not None)):
        text, thinks = text + begin, False
        ids = [*ids, *await model.encode(begin, special=False)]
    more: dict[str, Any] = {}
    if body.logprobs:
        more = {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if form is not None:
        more["structured_outputs"] = form
    if "<|channel|>" in template:
        more["skip_special_tokens"] = True  # they are read as tokens
    elif has_special_marks(template):
        more["skip_special_tokens"] = False
        response = model.tokenizer.backend.token_to_id(RESPONSE)
        if schemas and response is not None:
            more["stop_token_ids"] = [*(body.stop_token_ids or ()), response]
    if body.stop:
        more["stop_outside"] = _hidden(template, text, thinks, bool(schemas))
    prepared = prepare(model, body, [ids], max_tokens=most, more=more, most_seconds=most_seconds)
    calling = template if grammar or form is None else ""  # an answer of another form has no calls
    choices = []
    for _ in range(prepared.n):
        calls = calls_of(calling, schemas, known=wanted is not None)
        words = Detokenizer(model.tokenizer.backend) if body.return_rounds else None
        echo = last if body.echo and body.messages[-1].role == "assistant" else ""
        parser = _parser(model, text, thinks, calls)
        one_call = body.parallel_tool_calls is False
        choices.append(ChatChoice(parser=parser, one_call=one_call, echo=echo, words=words))
    return prepared, choices


async def _rendered(model: Model, body: ChatRequest, tools: list[Tool]) -> tuple[list[int], str]:
    """Token ids and text of the prompt. Raises ApiError."""
    continued = bool(body.continue_final_message)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    try:
        return await model.chat(
            body.messages,
            tools,
            variables,
            generation_prompt=not continued and body.add_generation_prompt is not False,
            continued=continued,
            any_length=body.truncate_prompt_tokens is not None,
        )
    except TypeError as error:  # a variable with a name of the renderer's own
        raise ApiError(400, f"chat_template_kwargs is refused: {error}", "chat_template_kwargs") from None
    except RequestError as error:
        raise refused(error) from None


def _begin(template: str, text: str, thinks: bool, calls: bool) -> str:
    """The text that ends a prompt before an answer in a form, which has no thoughts and begins with its content.

    calls: whether the form is that of calls, which has their channel.
    """
    if "<|channel|>" in template:
        header = text[text.rfind("<|start|>") :]
        return "" if calls or "<|message|>" in header else "<|channel|>final<|message|>"
    thoughts = thoughts_of(template)
    return f"\n{thoughts.end}\n\n" if thinks and thoughts else ""


def _parser(model: Model, text: str, thinks: bool, calls: Stage) -> AnswerParser | Channels:
    """What reads the answer to a prompt of this text, as the template's family writes it."""
    if "<|channel|>" in model.template:
        return Channels(model.tokenizer, text, calls)
    if (thoughts := thoughts_of(model.template)) is not None:
        think = Think(thinks, thoughts.begin, thoughts.end)
        return AnswerParser(think, calls, model.tokenizer.backend.token_to_id(thoughts.end))
    return AnswerParser(None, calls)


def _hidden(template: str, prompt: str, thinks: bool, tools: bool) -> list[tuple[str, str]]:
    """Marks around what is no content of an answer: `stop` is about the content."""
    if "<|channel|>" in template:
        header, body, _ = prompt[prompt.rfind("<|start|>") :].partition("<|message|>")
        pairs = [
            ("<|start|>", "<|message|>"),
            ("<|channel|>analysis", "<|end|>"),
            ("<|channel|>commentary to=", "<|call|>"),
            ("<|start|>assistant to=", "<|call|>"),
        ]
        if not body:
            pairs.append(("", "<|message|>"))
        elif "<|channel|>analysis" in header:
            pairs.append(("", "<|end|>"))
        return pairs
    thoughts = thoughts_of(template)
    pairs = [] if thoughts is None else [(thoughts.begin, thoughts.end)]
    if thinks and thoughts is not None:
        pairs.append(("", thoughts.end))
    return [*pairs, *(marks_of_calls(template) if tools else ())]
