"""A loop over streamed responses as Codex runs it: items of the stream are sent back, beside tools that only it has."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
FUNCTION = {
    "type": "function", "name": "convert_money", "description": "Convert an amount of money", "strict": False,
    "parameters": {"amount": "integer", "from": "string", "to": "string"},
}  # fmt: skip
OTHERS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "custom", "name": "apply_patch", "description": "Change files",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
]  # fmt: skip
turns, sent = (
    [],
    [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Convert 130 euros to dollars."}],
        }
    ],
)
for _ in range(2):
    items, kinds = [], []
    for event in client.responses.create(
        model="tiny",
        input=sent,
        tools=[FUNCTION, *OTHERS],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": None, "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="8d1f6f0e-0c0e-4a8e-b6ec-2f8f6f1f2a11",
        text={"verbosity": "low"},
        store=False,
        stream=True,
        extra_body={"client_metadata": {"installation": "x"}, "service_tier": None},
        max_output_tokens=80,
    ):
        kinds.append(event.type)
        if event.type == "response.output_item.done":
            items.append(event.item)
    sent += [item.model_dump() for item in items]
    calls = [item for item in items if item.type == "function_call"]
    sent += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "141 dollars"} for call in calls
    ]
    texts = ["".join(part.text for part in item.content) for item in items if item.type == "message"]
    turns.append(
        {"calls": [[call.name, call.arguments] for call in calls], "text": "".join(texts), "last": kinds[-1]}
    )
print(json.dumps(turns))
