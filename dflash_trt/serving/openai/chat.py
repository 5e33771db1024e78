"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.decoding.output.detokenizer import Detokenizer
from dflash_trt.errors import RequestError
from dflash_trt.serving.openai import logprobs
from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.engine import EngineProcess
from dflash_trt.serving.openai.errors import ApiError, Names, refused
from dflash_trt.serving.openai.generation import Prepared, Usage, prepare, shortened, totals, updates
from dflash_trt.serving.openai.model import Model, text_of
from dflash_trt.serving.openai.parsing import AnswerParser, Part, Think, calls_of
from dflash_trt.serving.openai.protocol import ChatRequest
from dflash_trt.serving.openai.structure import names as form_names
from dflash_trt.serving.openai.structure import of_calls, of_format
from dflash_trt.serving.wire import Update


@dataclass
class ChatAnswer:
    """One choice of a chat so far."""

    parser: AnswerParser | Channels
    one_call: bool = False
    echo: str = ""  # the last message's content, which the answer's begins with
    words: Detokenizer | None = None  # splits the text by rounds
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def take(self, update: Update) -> list[dict[str, Any]]:
        """The deltas that an update gives."""
        parts = self.parser.push(update["text"], update["token_ids"])
        if "finish_reason" in update:
            parts += self.parser.finish(cut=update["finish_reason"] != "stop")
        deltas = [delta for part in parts if (delta := self._delta(part))]
        if (reason := update.get("finish_reason")) is not None:
            self.finish_reason = "tool_calls" if self.calls and reason == "stop" else reason
        return deltas

    def rounds(self, update: Update) -> list[dict[str, Any]]:
        """The texts of an update's rounds: of the accepted drafts, and of the target's own token."""
        assert self.words is not None
        made, at = [], 0
        for tokens, accepted, verified in update["rounds"]:
            ids = update["token_ids"][at : at + tokens]
            drafted, own = self.words.push(ids[:accepted]), self.words.push(ids[accepted:])
            made.append(
                {
                    "tokens": tokens,
                    "accepted": accepted,
                    "verified": verified,
                    "drafted": drafted,
                    "own": own,
                }
            )
            at += tokens
        return made

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.call is None:
            if part.kind == "reasoning":
                self.reasoning += part.text
                return {"reasoning_content": part.text}
            self.content += part.text
            return {"content": part.text}
        if self.one_call and self.calls:
            return {}
        call = part.call
        made = {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self.calls.append(made)
        return {"tool_calls": [{"index": len(self.calls) - 1, **made}]}

    def message(self) -> dict[str, Any]:
        """The whole message."""
        content = self.echo + self.content
        made: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = self.calls
        return made


@dataclass
class Chat:
    """A chat that is ready to be decoded."""

    model: Model
    body: ChatRequest
    id: str
    prepared: Prepared
    answers: list[ChatAnswer]
    names: Names
    usage: Usage = field(default_factory=lambda: Usage(reasoning=0))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    async def of(cls, model: Model, body: ChatRequest, request_id: str, most_seconds: float | None) -> Chat:
        """Render and tokenize. Raises ApiError."""
        names: list[tuple[str, str]] = [("^prompt$", "messages")]
        if body.max_completion_tokens is not None and body.max_tokens is None:
            names.append((r"\bmax_tokens\b", "max_completion_tokens"))
        try:
            return await cls._of(model, body, request_id, most_seconds, names)
        except ApiError as error:
            raise error.renamed(names) from None

    @classmethod
    async def _of(
        cls,
        model: Model,
        body: ChatRequest,
        request_id: str,
        most_seconds: float | None,
        names: list[tuple[str, str]],
    ) -> Chat:
        model.check_name(body.model)
        tools = body.tools if body.tools and body.tool_choice != "none" else None
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens are given, expected one", "max_tokens")
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            raise ApiError(
                400, "continue_final_message and add_generation_prompt are true, expected one of them",
                "continue_final_message",
            )  # fmt: skip
        given = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        try:
            ids, text = await model.chat(
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
        ids = shortened(model, body, ids, given)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs is given, but logprobs is not true: set it", "top_logprobs")
        more: dict[str, Any] = {}
        if body.logprobs:
            more = {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
        schemas = {tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None
        template, wanted = model.template, of_format(body)
        grammar = of_calls(body, tools or [], calls_of(template, schemas), wanted)
        names += form_names(body, "tools" if grammar else "response_format" if body.response_format else "")
        form = grammar or wanted
        last = text_of(body.messages[-1].content)
        # Whether the answer begins within a thought, which its generation prompt or the continued message has begun.
        thinks = text.rstrip().endswith("<think>") or (
            continued and last.rfind("<think>") > last.rfind("</think>")
        )
        calling = template if grammar or form is None else ""  # an answer of another form has no calls
        if form is not None:
            more["structured_outputs"] = form
            # The form is that of the answer, so the answer begins here.
            begin = ""
            if "<|channel|>" in template and "<|message|>" not in text[text.rfind("<|start|>") :]:
                begin = "<|channel|>final<|message|>"
            elif thinks:
                begin = "\n</think>\n\n"
            if begin:
                text += begin
                thinks, ids = False, [*ids, *await model.encode(begin, special=False)]
        if "<|channel|>" in template:
            more["skip_special_tokens"] = True  # they are read as tokens
        if body.stop:
            more["stop_outside"] = _hidden(template, text, thinks, bool(schemas))
        prepared = prepare(model, body, [ids], max_tokens=given, more=more, most_seconds=most_seconds)
        answers = []
        for _ in range(prepared.n):
            calls = calls_of(calling, schemas, known=wanted is not None)
            parser: AnswerParser | Channels
            if "<|channel|>" in template:
                parser = Channels(model.tokenizer, text, calls)
            elif "<think>" in template or "</think>" in template:
                end = model.tokenizer.backend.token_to_id("</think>")
                parser = AnswerParser(Think(thinks), calls, end)
            else:
                parser = AnswerParser(calls_of("", None), calls)
            words = Detokenizer(model.tokenizer.backend) if body.return_rounds else None
            echo = last if body.echo and body.messages[-1].role == "assistant" else ""
            answers.append(ChatAnswer(parser, body.parallel_tool_calls is False, echo, words))
        return cls(model, body, f"chatcmpl-{request_id}", prepared, answers, names)

    async def run(
        self, engine: EngineProcess
    ) -> AsyncGenerator[tuple[int, Update, list[dict[str, Any]]], None]:
        """Index, update and deltas of each choice, as they come. Raises ApiError."""
        try:
            async with aclosing(updates(engine, self.prepared)) as found:
                async for index, update in found:
                    self.usage.add(update, prompt=index == 0)
                    answer = self.answers[index]
                    answer.token_ids += update["token_ids"]
                    deltas = answer.take(update)
                    self.usage.reasoning = sum(each.parser.reasoning_tokens for each in self.answers)
                    if not self.body.include_reasoning:
                        deltas = [delta for delta in deltas if "reasoning_content" not in delta]
                        answer.reasoning = ""
                    if (logprob := logprobs.of_chat(self.model, update)) is not None:
                        answer.logprobs += logprob["content"]
                    yield index, update, deltas
        except ApiError as error:
            raise error.renamed(self.names) from None

    def reasons(self) -> list[str | None]:
        """The finish reasons of the choices so far."""
        return [answer.finish_reason for answer in self.answers]

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return all(self.reasons())

    async def whole(self, engine: EngineProcess) -> dict[str, Any]:
        """The answer at once."""
        async with aclosing(self.run(engine)) as found:
            async for _ in found:
                pass
        choices = []
        for index, answer in enumerate(self.answers):
            choice = {"index": index, "message": answer.message(), "finish_reason": answer.finish_reason}
            choice["logprobs"] = {"content": answer.logprobs, "refusal": None} if self.body.logprobs else None
            if self.body.return_token_ids:
                choice["token_ids"] = answer.token_ids
            choices.append(choice)
        return self._frame("chat.completion", choices) | self._ended()

    async def chunks(self, engine: EngineProcess) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks."""
        options = self.body.stream_options
        always = options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        async with aclosing(self.run(engine)) as found:
            async for index, update, deltas in found:
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""}, usage=always)
                    if echo := self.answers[index].echo:
                        yield self._chunk(index, {"content": echo}, usage=always)
                reason = self.answers[index].finish_reason
                logprob = logprobs.of_chat(self.model, update)
                asked = self.body.return_token_ids or self.body.return_rounds
                if not deltas and (reason or logprob or (asked and update["token_ids"])):
                    deltas = [{}]
                for at, delta in enumerate(deltas):
                    last = at == len(deltas) - 1
                    chunk = self._chunk(index, delta, reason if last else None, usage=always)
                    if last:
                        chunk["choices"][0]["logprobs"] = logprob
                        if self.body.return_token_ids:
                            chunk["choices"][0]["token_ids"] = update["token_ids"]
                        if self.body.return_rounds:
                            chunk["choices"][0]["rounds"] = self.answers[index].rounds(update)
                    yield chunk
        if options is not None and options.include_usage:
            yield self._frame("chat.completion.chunk", []) | self._ended()

    def _ended(self) -> dict[str, Any]:
        return totals(self.usage, self.model, self.body, self.prepared)

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, *, usage: bool
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = self._frame("chat.completion.chunk", [choice])
        return chunk | {"usage": self.usage.to_dict()} if usage else chunk

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }


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
    pairs = [("<think>", "</think>")] if "</think>" in template or "<think>" in template else []
    if thinks:
        pairs.append(("", "</think>"))
    return [*pairs, ("<tool_call>", "</tool_call>")] if tools and "<tool_call>" in template else pairs
