"""Requests that are answered by JSON function calls."""

from __future__ import annotations

import json
import random
from typing import Any

from build_scripts.corpus import entries

# What a parameter can be.
VALUES: dict[str, list[Any]] = {
    "city": list(entries("Lisbon; Oslo; Kyoto; Cairo; Quito; Perth; Dublin; Hanoi; Turin; Bergen; Porto; Lyon")),
    "person": list(entries("Maya; Leo; Nina; Omar; Ruth; Ivan; Tara; Hugo; Lena; Sami; Cora; Felix; Dina; Paul")),
    "topic": list(entries("the budget; the new design; the travel plan; the test results; the garden party")),
    "day": list(entries("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")),
    "goods": list(entries("desk lamp; rain coat; tea pot; notebook; phone case; wall clock; travel bag; wool scarf")),
    "music": list(entries("jazz; folk; piano; opera; rock; choir; drum")),
    "room": list(entries("kitchen; bedroom; office; hall; garage; bathroom")), "unit": ["celsius", "fahrenheit"],
    "small": list(range(2, 10)), "minutes": list(range(15, 95, 5)), "price": list(range(10, 200, 5)),
    "flag": [True, False],
    "time": [f"{hour:02d}:{minute:02d}" for hour in range(7, 22) for minute in (0, 15, 30, 45)],
    "coin": ["dollars", "euros", "pounds", "francs", "crowns"],
}  # fmt: skip
# name: description, parameters and what they are, and a way to ask. `city2` is another city than `city`.
TOOLS: dict[str, tuple[str, dict[str, str], str]] = {
    "get_weather": (
        "Weather forecast of a city",
        {"city": "city", "days": "small", "unit": "unit"},
        "What will the weather be in {city} over the next {days} days, in {unit}?",
    ),
    "book_table": (
        "Reserve a table in a restaurant",
        {"city": "city", "guests": "small", "day": "day", "time": "time"},
        "Please book a table for {guests} in {city} on {day} at {time}.",
    ),
    "send_message": (
        "Send a message to a person",
        {"to": "person", "subject": "topic", "urgent": "flag"},
        "Send {to} a message about {subject}. Urgent: {urgent}.",
    ),
    "create_event": (
        "Add an event to the calendar",
        {"title": "topic", "day": "day", "time": "time", "minutes": "minutes", "guest": "person"},
        "Plan a meeting on {title} with {guest} on {day} at {time} for {minutes} minutes.",
    ),
    "find_trains": (
        "Search train connections",
        {"origin": "city", "destination": "city2", "day": "day", "time": "time"},
        "Which trains go from {origin} to {destination} on {day} after {time}?",
    ),
    "search_products": (
        "Search the shop",
        {"query": "goods", "max_price": "price", "count": "small"},
        "Show me {count} offers for a {query} below {max_price} dollars.",
    ),
    "play_music": (
        "Play music in a room",
        {"style": "music", "room": "room", "volume": "small"},
        "Play some {style} music in the {room} at volume {volume}.",
    ),
    "convert_money": (
        "Convert an amount of money",
        {"amount": "price", "from": "coin", "to": "coin2"},
        "How much are {amount} {from} in {to}?",
    ),
}
_TYPES = {bool: "boolean", int: "integer", str: "string"}


def signature(name: str) -> str:
    """One tool, in the form of the system message."""
    description, parameters, _ = TOOLS[name]
    types = {key: _TYPES[type(VALUES[kind.rstrip("2")][0])] for key, kind in parameters.items()}
    return json.dumps({"name": name, "description": description, "parameters": types})


def system_message(names: list[str]) -> str:
    """The system message that offers these tools."""
    listed = "\n".join(signature(name) for name in names)
    return (
        f"# Tools\n\nYou may call these functions:\n<tools>\n{listed}\n</tools>\n"
        "Answer with one JSON object per call, inside <tool_call></tool_call>."
    )


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages and the calls that answer them: one to three calls, in the requested order."""
    names = rng.sample(sorted(TOOLS), rng.randint(2, 3))
    calls = names[: rng.randint(1, len(names))]
    rng.shuffle(names)
    asked, answered = [], []
    for name in calls:
        _, parameters, wording = TOOLS[name]
        values: dict[str, Any] = {}
        for key, kind in parameters.items():
            others = values.values() if kind.endswith("2") else ()
            values[key] = rng.choice([value for value in VALUES[kind.rstrip("2")] if value not in others])
        spoken = {
            key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()
        }
        asked.append(wording.format(**spoken))
        answered.append(f"<tool_call>\n{json.dumps({'name': name, 'arguments': values})}\n</tool_call>")
    messages = [
        {"role": "system", "content": system_message(names)},
        {"role": "user", "content": rng.choice((" ", " Then: ", " Also: ")).join(asked)},
    ]
    return messages, "\n".join(answered)
