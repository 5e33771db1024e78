"""Function calling: the model names a function and its arguments as JSON, and this program calls it.

python examples/tools.py tiny "Give me the 3 day forecast for Oslo in celsius."

The template of `tiny` shows the functions to the model and asks for calls in <tool_call> tags. The shipped pair has
four million parameters. It knows only the functions that it was trained on, and often names another city. An answer
that is not a call is printed as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from dflash_trt import LLM, DFlashError, SamplingParams

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather forecast of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string"},
                },
                "required": ["city", "days", "unit"],
            },
        },
    }
]


def get_weather(city: str, days: int, unit: str) -> str:
    return f"{city}: rain for {days} days, in {unit}"


FUNCTIONS = {"get_weather": get_weather}


def calls(text: str) -> list[dict[str, Any]]:
    """The calls in an answer: JSON objects with a name and arguments, in tags or bare."""
    found = []
    for part in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL) or [text]:
        try:
            call = json.loads(part)
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("arguments"), dict):
            found.append(call)
    return found


def call(request: dict[str, Any]) -> str:
    """The result as JSON. The model wrote the request, so a wrong name or argument is its error."""
    function = FUNCTIONS.get(str(request.get("name")))
    try:
        result = {"result": function(**request["arguments"])} if function else {"error": "no such function"}
    except TypeError as error:
        result = {"error": str(error)}
    return json.dumps(result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", help="a directory made by `dflash-trt build`, or the name of a pair")
    parser.add_argument("question")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    messages = [{"role": "user", "content": args.question}]
    params = SamplingParams(max_tokens=args.max_tokens)
    with LLM(args.bundle) as llm:
        answer = llm.chat(messages, params, chat_template_kwargs={"tools": TOOLS}).text
        print(answer)
        requests = calls(answer)
        messages.append({"role": "assistant", "content": answer})
        for request in requests:
            result = call(request)
            print(f"{request.get('name')} -> {result}")
            messages.append({"role": "tool", "content": result})
        if requests:
            print(llm.chat(messages, params, chat_template_kwargs={"tools": TOOLS}).text)


if __name__ == "__main__":
    try:
        main()
    except DFlashError as error:  # such as a bundle that is not there, or a package that is not installed
        raise SystemExit(f"error: {error}") from None
