"""Pydantic AI: an answer, a stream, tools that are called, objects by a tool and by a format, and responses."""

import asyncio
import json
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = "What should I eat in Borvik?"


class Trip(BaseModel):
    city: Literal["Borvik", "Hestin"]
    days: Literal[1, 2, 3]


called = []


def convert_money(amount: Annotated[int, Field(le=999)]) -> str:
    """Convert an amount of money."""
    called.append(amount)
    return "55 dollars"


async def streamed(agent: Agent) -> list[str]:
    async with agent.run_stream(ASKED) as answer:
        return [text async for text in answer.stream_text(delta=True, debounce_by=None)]


provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
settings = {"max_tokens": 40, "temperature": 0}
chat = OpenAIChatModel("tiny", provider=provider, settings=settings)
agent = Agent(chat)
whole = agent.run_sync(ASKED)
response = Agent(OpenAIResponsesModel("tiny", provider=provider, settings=settings)).run_sync(ASKED)
one = {**settings, "parallel_tool_calls": False, "max_tokens": 120}
by_tool = Agent(chat, output_type=Trip, model_settings=one).run_sync("A trip")
by_format = Agent(chat, output_type=NativeOutput(Trip), model_settings=one).run_sync("A trip")
try:  # with a tool and a format the model may call first
    both = Agent(chat, output_type=NativeOutput(Trip), tools=[convert_money], model_settings=one)
    last = both.run_sync("Convert 130 euros to dollars.", usage_limits=UsageLimits(request_limit=4)).output
    ended = last.model_dump()
except Exception as error:
    ended = f"{type(error).__name__}: {error}"
print(
    json.dumps(
        {
            "whole": whole.output,
            "tokens": whole.usage.output_tokens,
            "chunks": asyncio.run(streamed(agent)),
            "response": response.output,
            "by_tool": by_tool.output.model_dump(),
            "by_format": by_format.output.model_dump(),
            "called": called,
            "ended": ended,
        }
    )
)
