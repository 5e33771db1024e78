"""POST /v1/chat/completions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.decoding.output import Detokenizer
from dflash_trt.errors import shorten
from dflash_trt.serving.openai.calls import Schemas
from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.generation import AnswerChoice, Generation, Usage, engine_request
from dflash_trt.serving.openai.model import Model, chat_logprobs
from dflash_trt.serving.openai.parsing import AnswerParser, AnswerPart, MarkedCalls, Stage, Think
from dflash_trt.serving.openai.protocol import ChatRequest
from dflash_trt.serving.openai.reading import Json, ToolChoice
from dflash_trt.serving.openai.reading import tool_choice as tool_choice_of
from dflash_trt.serving.openai.reading import tools as tools_of
from dflash_trt.serving.openai.structure import calls_form, form_of, frame_of, names_of
from dflash_trt.serving.openai.written import RESPONSE, Written
from dflash_trt.serving.wire import EngineRequest, Update


@dataclass(kw_only=True)
class ChatChoice(AnswerChoice):
    """One choice of a chat so far.

    words: splits the text by rounds. calls: how many there have been. parts: those of the whole answer.
    """

    parser: AnswerParser | Channels
    words: Detokenizer | None = None
    calls: int = 0
    parts: list[AnswerPart] = field(default_factory=list)

    def rounds(self, update: Update) -> list[dict[str, Any]]:
        """The texts of an update's rounds: of the drafter's accepted drafts, of those from the chat's own text, and of
        the target's own token.
        """
        assert self.words is not None
        rounds, at = [], 0
        for tokens, accepted, verified, copied in update["rounds"]:
            ids, first = update["token_ids"][at : at + tokens], accepted - copied
            texts = [self.words.push(part) for part in (ids[:first], ids[first:accepted], ids[accepted:])]
            counts = {"tokens": tokens, "accepted": accepted, "verified": verified}
            rounds.append({**counts, **dict(zip(("drafted", "copied", "own"), texts, strict=True))})
            at += tokens
        return rounds


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
            request, prompt, choices = await _prepared(model, body, most_seconds, names)
        except ApiError as error:
            raise error.renamed(names) from None
        return cls(
            model, body, f"chatcmpl-{request_id}", request, [prompt], choices, names, Usage(reasoning=0)
        )

    def parts(self, index: int, update: Update) -> list[AnswerPart]:
        """The parts of the answer that an update of a choice makes certain."""
        choice, reason = self.choices[index], update.get("finish_reason")
        parts = choice.parser.push(update["text"], update["token_ids"])
        if reason is not None:
            required = tool_choice_of(self.body.tool_choice).mode == "required"
            parts += choice.parser.finish(begun=required and reason != "stop")
        self.usage.reasoning = sum(answer.parser.reasoning_tokens for answer in self.choices)
        calls = [part for part in parts if part.call]
        if self.body.parallel_tool_calls is False:
            calls = calls[: 1 - choice.calls]
        choice.calls += len(calls)
        if reason == "stop" and choice.calls:
            choice.finish_reason = "tool_calls"
        hidden = ("reasoning",) if self.body.include_reasoning is False else ()
        return [part for part in parts if part.kind not in hidden and (part.call is None or part in calls)]

    def add(self, index: int, update: Update) -> None:
        self.choices[index].parts += self.parts(index, update)
        self.choices[index].note(self._logprobs(update))

    def content(self, index: int) -> Json:
        return {"message": _message(self.choices[index])}

    def _logprobs(self, update: Update) -> Json | None:
        return chat_logprobs(self.model, update, self.body.top_logprobs or 0)

    def _totals(self) -> Json:
        return super()._totals() | self.of_prompts.get(0, {})

    def deltas(self, index: int, update: Update) -> Iterator[Json]:
        choice = self.choices[index]
        if not choice.begun:
            choice.begun = True
            yield self._delta(index, {"role": "assistant", "content": ""})
        numbers = itertools.count(choice.calls)
        deltas = [_delta(part, numbers) for part in self.parts(index, update)]
        more = self._beside(choice, update)
        if not deltas and any(more.values()):
            deltas = [{}]
        for delta in deltas[:-1]:
            yield self._delta(index, delta)
        for delta in deltas[-1:]:
            yield self._delta(index, delta, **more)

    def _beside(self, choice: ChatChoice, update: Update) -> dict[str, Any]:
        """What the last delta of an update has beside its text."""
        more: dict[str, Any] = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        more["logprobs"] = self._logprobs(update)
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
    return _reasoning(part.text) if part.kind == "reasoning" else {"content": part.text}


def _reasoning(text: str) -> Json:
    """Reasoning under its names in clients: those of DeepSeek's API, and of OpenRouter and vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _message(choice: ChatChoice) -> Json:
    """The message of a whole answer."""
    content, reasoning = (
        "".join(p.text for p in choice.parts if p.kind == kind) for kind in ("content", "reasoning")
    )
    calls = [part.call.to_dict() for part in choice.parts if part.call]
    message: Json = {"role": "assistant", "content": content or (None if calls else "")}
    message |= _reasoning(reasoning) if reasoning else {}
    return message | {"tool_calls": calls} if calls else message


def _check(body: ChatRequest) -> None:
    """Raise ApiError for fields that exclude each other."""
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
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
) -> tuple[EngineRequest, list[int], list[ChatChoice]]:
    """The engine's request, its prompt, and the choices, without text yet. names: gets those of the form's fields."""
    written = model.written
    choice, tools = tool_choice_of(body.tool_choice), tools_of(body.tools)
    callable_tools = _callable(choice, tools)
    if choice.mode == "none":
        tools = []
    elif choice.mode == "auto":  # the model may call what it sees
        tools = callable_tools
    most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    ids, text, message = await _rendered(model, body, tools)
    last = message["content"]
    wanted = form_of(body)
    frame = frame_of(written, model.tokenizer.backend.token_to_id, text[max(text.rfind("<|start|>"), 0) :])
    single = choice.one or body.parallel_tool_calls is False
    beside = wanted if body.response_format is not None and choice.mode != "none" else None
    grammar = calls_form(choice, callable_tools, frame, single=single, beside=beside)
    names += names_of(body, calls=grammar is not None)
    form = grammar or wanted
    # Whether the answer begins within a thought, which its generation prompt or the continued message has begun.
    thoughts = written.thoughts
    thinks = thoughts is not None and (
        thoughts.within(text)
        or (bool(body.continue_final_message) and last.rfind(thoughts.begin) > last.rfind(thoughts.end))
    )
    if form is not None and (begin := form_beginning(written, text, thinks, calls=grammar is not None)):
        text, thinks = text + begin, False
        ids = [*ids, *await model.encode(begin, special=False)]
    more = _params(model, body, form, bool(tools))
    if body.stop:
        more["stop_outside"] = marks_around(written, text, thinks, bool(tools))
    request = engine_request(model, body, [ids], max_tokens=most, more=more, most_seconds=most_seconds)
    schemas = (
        {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
        if tools
        else None
    )
    choices = []
    for _ in range(request["n"]):
        # An answer of another form has no calls.
        calls = written.calls(schemas if grammar or form is None else None)
        words = Detokenizer(model.tokenizer.backend) if body.return_rounds else None
        parser = _parser(model, text, thinks, calls, schemas)
        choices.append(ChatChoice(parser=parser, words=words))
    return request, ids, choices


def _params(model: Model, body: ChatRequest, form: Json | None, tools: bool) -> Json:
    """Fields of `SamplingParams` that the chat's family needs. tools: whether the model sees any."""
    more: Json = {}
    if body.logprobs:
        more = {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if form is not None:
        more["structured_outputs"] = form
    if model.written.channels:
        more["skip_special_tokens"] = True  # they are read as tokens
    elif model.written.special:
        more["skip_special_tokens"] = False
        response = model.tokenizer.backend.token_to_id(RESPONSE)
        if tools and response is not None:
            more["stop_token_ids"] = [*(body.stop_token_ids or ()), response]
    return more


def _callable(choice: ToolChoice, tools: list[Json]) -> list[Json]:
    """The tools that an answer may call. Raises ApiError if it must call one that is not there."""
    names = [tool["function"]["name"] for tool in tools]
    for name in choice.names or ():
        if name not in names:
            raise ApiError(
                400, f"tool_choice names {shorten(name, 100)}, which is not in tools", "tool_choice"
            )
    if choice.mode == "required" and not tools:
        raise ApiError(400, "tool_choice requires a call, but tools has no function", "tool_choice")
    return [tool for tool in tools if choice.names is None or tool["function"]["name"] in choice.names]


async def _rendered(model: Model, body: ChatRequest, tools: list[Json]) -> tuple[list[int], str, Json]:
    """Token ids and text of the prompt, and the last message. Raises ApiError."""
    continued = bool(body.continue_final_message)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if model.written.recipients:  # Muse Glimmer's has a name and least and greatest values of its own
            effort = {"none": "low", "minimal": "low", "xhigh": "max"}
            strength = effort.get(body.reasoning_effort, body.reasoning_effort)
            variables.setdefault("reasoning_strength", strength)
    if body.documents:
        variables["documents"] = body.documents
    return await model.chat(
        body.conversation,
        tools,
        variables,
        generation_prompt=not continued and body.add_generation_prompt is not False,
        continued=continued,
        special=bool(body.add_special_tokens),
    )


def form_beginning(written: Written, text: str, thinks: bool, calls: bool) -> str:
    """The text that ends a prompt before an answer in a form, which has no thoughts and begins with its content.

    calls: whether the form is that of calls, which has their channel.
    """
    if written.channels:
        header = text[text.rfind("<|start|>") :]
        begin = " to=user<|message|>" if written.recipients else "<|channel|>final<|message|>"
        return "" if calls or "<|message|>" in header else begin
    thoughts = written.thoughts
    return f"\n{thoughts.end}\n\n" if thinks and thoughts else ""


def _parser(
    model: Model, text: str, thinks: bool, calls: Stage, schemas: Schemas | None
) -> AnswerParser | Channels:
    """What reads the answer to a prompt of this text, as the template's family writes it."""
    if model.written.channels:
        return Channels(model.tokenizer, text, calls, (schemas or {}) if model.written.recipients else None)
    if (thoughts := model.written.thoughts) is not None:
        notation = calls.notation if isinstance(calls, MarkedCalls) else None
        think = Think(thinks, thoughts.begin, thoughts.end, notation)
        token_id = model.tokenizer.backend.token_to_id
        call = token_id(notation.begin) if notation else None
        return AnswerParser(think, calls, token_id(thoughts.end), call)
    return AnswerParser(None, calls)


def marks_around(written: Written, prompt: str, thinks: bool, tools: bool) -> list[tuple[str, str]]:
    """Marks around what is no content of an answer: `stop` is about the content."""
    if written.channels:
        header, body, _ = prompt[prompt.rfind("<|start|>") :].partition("<|message|>")
        if written.recipients:
            marks = [
                ("<|start|>", "<|message|>"),
                ("to=self", "<|eom|>"),
                ("<atem:function_calls>", "<|eom|>"),
            ]
            return marks if body else [*marks, ("", "<|message|>")]
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
    thoughts = written.thoughts
    pairs = [] if thoughts is None else [(thoughts.begin, thoughts.end)]
    if thinks and thoughts is not None:
        pairs.append(("", thoughts.end))
    return [*pairs, *(written.call_marks if tools else ())]
