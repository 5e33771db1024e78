"""The bodies of requests: OpenAI's fields, vLLM's additions under their names there, and our own.

Clients are read liberally and answered strictly. Null is as good as nothing. Of fields that this server does not have,
the value that changes nothing is taken, and any other is refused by the field's name. Every field has a bound, so that
the time and memory of a request have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import to_json

from dflash_trt.decoding.params import (
    MOST_ALLOWED,
    MOST_PRIORITY,
    MOST_WORDS,
    SamplingParams,
)
from dflash_trt.decoding.sampling.structure import MOST_CHARACTERS as MOST_FORM_CHARACTERS
from dflash_trt.errors import quoted, show, show_name
from dflash_trt.serving.openai import reading
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.reading import Json, refuse

MOST_PROMPTS = 1024
MOST_MESSAGES = 1 << 14  # and documents, and items of a response's input
MOST_TOOLS = 1024
_MOST_TOOL_BYTES = 1 << 20  # of all tools
_BYTES = 6  # of a character in JSON, at most

# Accepted with every value: they are about OpenAI's own service, or say nothing about the answer.
_WITHOUT_EFFECT = frozenset((
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "client_metadata", "verbosity", "prediction", "max_tool_calls",
    "spaces_between_special_tokens", "extra_headers", "request_id",
))  # fmt: skip
# Fields that this server does not have, and their values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "length_penalty": (1,), "use_beam_search": (False,), "early_stopping": (False,),
    "detokenize": (True,), "typical_p": (1,), "modalities": (["text"],), "functions": ([],),
    "function_call": ("auto", "none"), "background": (False,), "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,), "return_token_strs": (False,), "echo": (False,),
    "mm_processor_kwargs": ({},), "vllm_xargs": ({},), "extra_body": ({},),
}  # fmt: skip
_WHY = {
    "previous_response_id": "nothing is stored here: send the whole conversation as input",
    "conversation": "nothing is stored here: send the whole conversation as input",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "web_search_options": "this server does not search",
}


def _whole(value: Any) -> Any:
    """An integer that a client has written with a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _words(value: Any) -> Any:
    """Texts, one of which may stand alone. Empty ones say nothing."""
    return (
        [word for word in value if word != ""] if isinstance(value, list) else [value] if value != "" else []
    )


def _biases(value: Json) -> Json:
    """Token ids and numbers, of which the first wrong one is refused: pydantic would collect all of them."""
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise ApiError(400, f"logit_bias has the key {quoted(key)}, expected a token id", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            refuse(f"logit_bias.{key}", bias, "a number")
    return value


def _bounded(most: int) -> Callable[[Any], Any]:
    """A validator of values with at most so many bytes as JSON."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list | str) and (size := len(to_json(value))) > most:
            raise ValueError(f"it has {size} bytes, expected at most {most}")
        return value

    return check


Int = Annotated[int, BeforeValidator(_whole)]
Priority = Annotated[Int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
Ids = Annotated[list[int], Field(max_length=MOST_WORDS, fail_fast=True)]
Words = Annotated[list[str], Field(max_length=MOST_WORDS, fail_fast=True), BeforeValidator(_words)]
Form = Annotated[Any, BeforeValidator(_bounded(_BYTES * MOST_FORM_CHARACTERS))]
Tools = Annotated[list[Any], Field(max_length=MOST_TOOLS), BeforeValidator(_bounded(_MOST_TOOL_BYTES))]
Most = Annotated[Int, Field(ge=0, le=20)]


class Body(BaseModel):
    """No value of another JSON type, and no other field with a value that asks for something.

    Each field is declared with its limit. A list or object is refused at its first wrong item: to collect the errors of
    a million takes many seconds.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="after")
    def _is_known(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            # 1 == True, so a number stands for no switch, nor the reverse.
            neutral = any(value == known and isinstance(value, bool) == isinstance(known, bool)
                          for known in _NEUTRAL.get(name, ()))  # fmt: skip
            if value is None or neutral or name in _WITHOUT_EFFECT:
                continue
            if name in _NEUTRAL and name not in _WHY:
                refuse(name, value, f"{show(_NEUTRAL[name][0])}: this server does nothing else")
            place, why = show_name(name), _WHY.get(name, "leave it out")
            raise ApiError(400, f"{place} is not a field that this server knows; {why}", place)
        return self


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk at the end, with the usage. `continuous_usage_stats`: usage in every chunk."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(Body):
    """The fields that all requests share. None stands for the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Ours: whether and how far to draft, and the seconds after which the answer ends.
    speculate: bool | None = None
    block_length: Int | None = None
    tree_nodes: Int | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    priority: Priority | None = None
    # vLLM's: cache rows are reused only between requests with the same one.
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    metadata: Json | None = None

    def answers(self) -> int:
        """How many answers the request asks for."""
        return 1


class SamplingFields(CommonFields):
    """The fields that chats and completions share."""

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Words | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    bad_words: Words | None = None
    min_tokens: Int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MOST_ALLOWED, fail_fast=True)] | None = None
    max_tokens: Int | None = None
    logit_bias: Annotated[Json, Field(max_length=MOST_WORDS), AfterValidator(_biases)] | None = None
    response_format: Form = None
    structured_outputs: Form = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Most | None = None  # vLLM's: of the so many best tokens at each place of the prompt
    # Ours: in a chat's stream, the text of each round, its accepted drafts apart.
    return_rounds: bool | None = None

    def answers(self) -> int:
        """`n`, by default 1."""
        return self.n or 1

    def sampling(self) -> Json:
        """The given fields of `SamplingParams`, with the values that other servers take beside its own."""
        fields = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if fields.get("top_k") == -1:  # all tokens, as in vLLM
            fields["top_k"] = 0
        if 0 < fields.get("temperature", 0) < 0.01:  # as in vLLM
            fields["temperature"] = 0.01
        if fields.get("top_p") == 0:  # the best token, as in OpenAI's API
            fields["top_p"] = 2.0**-126
        if (seed := fields.get("seed", 0)) < 0:  # -1: none, as in vLLM; OpenAI's are integers of 64 bits
            fields["seed"] = None if seed == -1 else seed % 2**64
        return fields


# Fields of a request that are `SamplingParams`' own, under the same name and with the same meaning.
SAMPLING = (SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()) - {
    *("max_tokens", "logit_bias", "structured_outputs", "prompt_logprobs")
}


def _no_logprobs(value: Any) -> Any:
    return None if value is False else _whole(value)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One text or list of ids, or several."""
    several = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not 0 < len(several) <= MOST_PROMPTS:
        text = f"prompt has {len(several)} texts, expected 1 to {MOST_PROMPTS}, or a text, or token ids"
        raise ApiError(400, text, "prompt")
    for i, one in enumerate(several):
        if not isinstance(one, str) and not _are_ids(one):
            refuse("prompt" if one is prompt else f"prompt[{i}]", one, "a text, or a list of token ids")
    return several


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[Any, AfterValidator(_prompts)]  # a list of texts and of lists of ids
    echo: bool | None = None
    logprobs: Annotated[Most | None, BeforeValidator(_no_logprobs)] = None

    def answers(self) -> int:
        """`n` for each prompt."""
        return len(self.prompt) * super().answers()


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Any], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Most | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[Any], Field(max_length=MOST_MESSAGES)] | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def conversation(self) -> list[Json]:
        """The messages as templates know them. It takes time. Raises ApiError."""
        return reading.messages(self.messages)


class Reasoning(BaseModel):
    """How a response is to reason."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None


class TextForm(BaseModel):
    """The form of a response's text."""

    model_config = ConfigDict(strict=True)

    format: Form = None


def _items(value: Any) -> str | list[Any]:
    if value == [] or not isinstance(value, str | list):
        refuse("input", value, "a text, or a list of items")
    if isinstance(value, list) and len(value) > MOST_MESSAGES:
        raise ApiError(400, f"input has too many items, expected at most {MOST_MESSAGES}", "input")
    return value


class ResponsesRequest(CommonFields):
    """POST /v1/responses."""

    input: Annotated[Any, AfterValidator(_items)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextForm | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Field(max_length=MOST_WORDS, fail_fast=True)] | None = None
    top_logprobs: Most | None = None  # without effect: OpenAI's API gives none unless `include` asks for them

    def chat(self) -> ChatRequest:
        """The same request as a chat. Raises ApiError."""
        if "message.output_text.logprobs" in (self.include or ()):
            text = "include has message.output_text.logprobs: responses have none here, but chats do"
            raise ApiError(400, text, "include")
        return _AsChat.model_construct(
            **{name: getattr(self, name) for name in CommonFields.model_fields},
            tools=self.tools, tool_choice=self.tool_choice, parallel_tool_calls=self.parallel_tool_calls,
            messages=[], response=self, max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning and self.reasoning.effort, response_format=self.text and self.text.format,
        )  # fmt: skip


class _AsChat(ChatRequest):
    """A response as a chat."""

    response: ResponsesRequest

    def conversation(self) -> list[Json]:
        """The messages that its items are."""
        return reading.items(self.response.input, self.response.instructions)


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Any], Field(max_length=MOST_MESSAGES)] | None = None
    tools: Tools | None = None
    chat_template_kwargs: Json | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=reading.MOST_VALUES, fail_fast=True)]
