"""The bodies of requests: OpenAI's fields, vLLM's additions under their names there, and our own.

A field that is not here is refused by name. Some fields have no effect on a local server. They are accepted with every
value that OpenAI's API has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from dflash_trt.decoding.params import MOST_PRIORITY, MOST_WORDS, SamplingParams
from dflash_trt.decoding.sampling.structure import MOST_CHOICES
from dflash_trt.serving.openai.errors import ApiError


def _fail_fast(schema: Any) -> None:
    """Let all lists of a schema of pydantic's core stop at their first error."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return
    for part in schema:
        _fail_fast(part)


class Body(BaseModel):
    """Strict: no field but those named, and no value of another JSON type.

    A list is refused at its first wrong item: to collect the errors of a million takes many seconds.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


MOST_PROMPTS = 1024
MOST_MESSAGES = 1 << 15  # and items of a response's input
MOST_TOOLS = 1024
# `SamplingParams` takes no more. Checked here, before anything is made of them.
Words = Annotated[list[str], Field(max_length=MOST_WORDS)]
Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]
Ids = Annotated[list[int], Field(max_length=MOST_WORDS)]


RequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
Verbosity = Literal["low", "medium", "high"]


class StreamOptions(Body):
    """`include_usage`: one more chunk at the end, with the usage. `continuous_usage_stats`: usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class StructureFields(Body):
    """`StructuredOutputs`: exactly one of these."""

    schema_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MOST_CHOICES)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None


class CommonFields(Body):
    """The fields that all requests share. None stands for the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    request_id: RequestId | None = None
    # Ours: whether and how far to draft, and the seconds after which the answer ends.
    speculate: bool | None = None
    block_length: int | None = None
    tree_nodes: int | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    priority: Priority | None = None
    # vLLM's: cache rows are reused only between requests with the same one.
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    # Without effect here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None

    def answers(self) -> int:
        """How many answers the request asks for."""
        return 1


class SamplingFields(CommonFields):
    """The fields that chats and completions share."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | Words | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    bad_words: Words | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    max_tokens: int | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_WORDS)] | None = None
    structured_outputs: StructureFields | None = None
    # vLLM's earlier names of the fields of `structured_outputs`.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    # Ours: in a chat's stream, the text of each round, its accepted drafts apart.
    return_rounds: bool | None = None

    def answers(self) -> int:
        """`n`, by default 1."""
        return self.n or 1

    def sampling(self) -> dict[str, Any]:
        """The given fields of `SamplingParams`."""
        given = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return given | {"top_k": 0} if given.get("top_k") == -1 else given  # -1: all tokens, as in vLLM


# Fields of a request that are `SamplingParams`' own, under the same name and with the same meaning.
SAMPLING = (SamplingFields.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()) - {
    *("max_tokens", "logit_bias", "structured_outputs")
}


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_special_tokens: bool = True
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def answers(self) -> int:
        """`n` for each prompt."""
        return len(self.prompts()) * super().answers()

    def prompts(self) -> list[str | list[int]]:
        """One text or list of ids, or several. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is [], expected a text, token ids, or a list of them", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) > MOST_PROMPTS:
            raise ApiError(400, f"prompt has {len(prompt)} texts, expected at most {MOST_PROMPTS}", "prompt")
        return prompt  # type: ignore[return-value]


class TextPart(Body):
    """A part of a content."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str


def _texts(content: Any) -> Any:
    """Raises PydanticCustomError for a part of a content that is no text, by its type."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(word in kind for word in ("image", "audio", "video", "file")):
            raise PydanticCustomError(
                "not_a_text", "this server reads text only, and one part is of type {kind}", {"kind": kind}
            )
    return content


class FunctionCall(Body):
    """The function that an answer has called."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One message. `content`: a text, or a list of parts that are texts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_texts)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A JSON schema of an answer."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Format(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema")
        return self


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Format | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    modalities: list[Literal["text"]] | None = None
    # Without effect here.
    verbosity: Verbosity | None = None
    prediction: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MOST_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
