"""LangChain's ChatOpenAI: an answer, a stream, several at once, a call, and an object of a schema."""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI

ASKED = "What should I eat in Borvik?"
TOOL = {
    "type": "function",
    "function": {
        "name": "convert_money",
        "description": "Convert an amount of money",
        "parameters": {
            "type": "object",
            "properties": {"amount": {"type": "integer", "maximum": 999}},
            "required": ["amount"],
            "additionalProperties": False,
        },
    },
}
WEATHER = {
    "title": "get_weather", "description": "The weather in a city", "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TRIP = {
    "title": "trip",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


async def several(chat: ChatOpenAI) -> list[str]:
    return [answer.content for answer in await chat.abatch([ASKED] * 3)]


url = sys.argv[1]
chat = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_tokens=40, temperature=0, max_retries=0)
whole = chat.invoke(ASKED)
chunks = list(chat.stream(ASKED, stream_usage=True))
call = chat.bind_tools([TOOL], tool_choice="required").invoke(
    "Convert 5 crowns", max_tokens=80, parallel_tool_calls=False
)
one = {"max_tokens": 80, "parallel_tool_calls": False}
any_call = chat.bind_tools([WEATHER], tool_choice="any").invoke(
    "The weather in Borvik on Monday at noon", **one
)
trip = chat.with_structured_output(TRIP, method="json_schema").invoke("A trip")
completion = OpenAI(base_url=url, api_key="none", model="tiny", max_tokens=12, temperature=0, max_retries=0)
print(
    json.dumps(
        {
            "whole": whole.content,
            "tokens": whole.usage_metadata["output_tokens"],
            "reason": whole.response_metadata["finish_reason"],
            "chunks": [chunk.content for chunk in chunks],
            "streamed_tokens": sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
            "several": asyncio.run(several(chat)),
            "calls": call.tool_calls,
            "any": any_call.tool_calls,
            "trip": trip,
            "completion": completion.invoke("x = ["),
        }
    )
)
