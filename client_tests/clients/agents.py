"""OpenAI's Agents SDK: a loop of two turns, over chats and over responses, whole and streamed."""

import asyncio
import json
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

ASKED = "Convert 130 euros to dollars."
set_tracing_disabled(True)
amounts = []


@function_tool
def convert_money(amount: Literal[20, 130]) -> str:
    """Convert an amount of money."""
    amounts.append(amount)
    return "141 dollars"


async def main() -> dict[str, object]:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
    # The first turn must call, and after a call the SDK leaves the choice to the model.
    settings = ModelSettings(temperature=0, max_tokens=250, tool_choice="required", parallel_tool_calls=False)
    answers: dict[str, object] = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="tiny", openai_client=client)
        agent = Agent(name="bank", model=model, tools=[convert_money], model_settings=settings)
        whole = await Runner.run(agent, ASKED, max_turns=4)
        streamed = Runner.run_streamed(agent, ASKED, max_turns=4)
        kinds = [
            event.item.type
            async for event in streamed.stream_events()
            if event.type == "run_item_stream_event"
        ]
        answers[kind.__name__] = {
            "items": [item.type for item in whole.new_items],
            "text": whole.final_output,
            "streamed": kinds,
            "streamed_text": streamed.final_output,
        }
    return answers | {"amounts": amounts}


print(json.dumps(asyncio.run(main())))
