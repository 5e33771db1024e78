"""LiteLLM: an answer, a stream, an asynchronous answer, a completion, a call, a schema, a refusal, and a fallback."""

import asyncio
import json
import sys

import litellm

ASKED = [{"role": "user", "content": "What should I eat in Borvik?"}]
CLOSED = {"additionalProperties": False}
AMOUNT = {"type": "integer", "maximum": 999}
PARAMETERS = {"type": "object", "properties": {"amount": AMOUNT}, "required": ["amount"]} | CLOSED
TOOL = {"type": "function", "function": {"name": "convert_money", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}

common = {"api_base": sys.argv[1], "api_key": "none", "temperature": 0, "max_retries": 0}
chat = {"model": "openai/tiny", "messages": ASKED, "max_tokens": 40, **common}
whole = litellm.completion(**chat)
chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
later = asyncio.run(litellm.acompletion(**chat))
legacy = litellm.text_completion(model="text-completion-openai/tiny", prompt="x = [", max_tokens=12, **common)
call = litellm.completion(
    **chat | {"max_tokens": 80}, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
)
form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
shaped = litellm.completion(**chat | {"max_tokens": 60}, response_format=form)
# A loop of two turns, whose messages are LiteLLM's own objects.
money = {
    "name": "convert_money",
    "description": "Convert an amount of money",
    "parameters": {"amount": "integer", "from": "string", "to": "string"},
}
loop = [{"role": "user", "content": "Convert 130 euros to dollars."}]
ask = chat | {"max_tokens": 80, "messages": loop}
first = litellm.completion(**ask, tools=[{"type": "function", "function": money}])
loop.append(first.choices[0].message)
for tool_call in first.choices[0].message.tool_calls:
    answer = {
        "role": "tool",
        "tool_call_id": tool_call.id,
        "name": tool_call.function.name,
        "content": "141 dollars",
    }
    loop.append(answer)
second = litellm.completion(**ask, tools=[{"type": "function", "function": money}])
loop.append(second.choices[0].message)
third = litellm.completion(**ask | {"messages": [*loop, {"role": "user", "content": "And 20?"}]})
try:
    litellm.completion(**chat | {"model": "openai/other"})
    refused = ""
except litellm.NotFoundError as error:
    refused = str(error)
# What does not fit the context goes on to the model that the router has for it.
models = [
    {"model_name": "small", "litellm_params": {"model": "openai/tiny", **common}},
    {"model_name": "large", "litellm_params": {"model": "openai/tiny", "mock_response": "of the large one"}},
]
router = litellm.Router(models, context_window_fallbacks=[{"small": ["large"]}], num_retries=0)
overflow = router.completion(model="small", messages=[{"role": "user", "content": "word " * 2000}])
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "tokens": whole.usage.completion_tokens,
            "reason": whole.choices[0].finish_reason,
            "chunks": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
            "later": later.choices[0].message.content,
            "completion": legacy.choices[0].text,
            "calls": [tool_call.function.model_dump() for tool_call in call.choices[0].message.tool_calls],
            "trip": json.loads(shaped.choices[0].message.content),
            "refused": refused,
            "loop": [tool_call.function.model_dump() for tool_call in first.choices[0].message.tool_calls],
            "second": second.choices[0].message.content,
            "third": third.usage.prompt_tokens,
            "overflow": overflow.choices[0].message.content,
        }
    )
)
