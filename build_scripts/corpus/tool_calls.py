"""Requests that are answered by JSON function calls."""

from __future__ import annotations

import json
import random

from build_scripts.corpus import entries

CITIES = entries("""
Lisbon; Oslo; Kyoto; Cairo; Quito; Perth; Dublin; Hanoi; Turin; Malmo; Bergen; Porto; Lyon; Graz; Nantes; Bilbao
""")
PEOPLE = entries("""
Maya; Leo; Nina; Omar; Ruth; Ivan; Tara; Hugo; Lena; Sami; Cora; Felix; Dina; Paul; Zoe; Adam
""")
TOPICS = (
    "the budget",
    "the new design",
    "the travel plan",
    "the test results",
    "the garden party",
    "the yearly report",
)
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
GOODS = entries("""
desk lamp; rain coat; tea pot; notebook; phone case; wall clock; travel bag; wool scarf
""")
SONGS = ("jazz", "folk", "piano", "opera", "rock", "choir", "drum")
ROOMS = ("kitchen", "bedroom", "office", "hall", "garage", "bathroom")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Polish")

# name: (description, {parameter: (slot, type)}, ways to ask)
TOOLS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "get_weather": (
        "Weather forecast of a city",
        {"city": "city", "days": "small", "unit": "unit"},
        (
            "What will the weather be in {city} over the next {days} days, in {unit}?",
            "Give me the {days} day forecast for {city} in {unit}.",
        ),
    ),
    "book_table": (
        "Reserve a table in a restaurant",
        {"city": "city", "guests": "small", "day": "day", "time": "time"},
        (
            "Please book a table for {guests} in {city} on {day} at {time}.",
            "I need a table in {city} for {guests} people, {day} at {time}.",
        ),
    ),
    "send_message": (
        "Send a message to a person",
        {"to": "person", "subject": "topic", "urgent": "flag"},
        (
            "Send {to} a message about {subject}. Urgent: {urgent}.",
            "Write to {to} about {subject} and set urgent to {urgent}.",
        ),
    ),
    "create_event": (
        "Add an event to the calendar",
        {"title": "topic", "day": "day", "time": "time", "minutes": "minutes", "guest": "person"},
        (
            "Plan a meeting on {title} with {guest} on {day} at {time} for {minutes} minutes.",
            "Put {title} into my calendar: {day} at {time}, {minutes} minutes, together with {guest}.",
        ),
    ),
    "find_trains": (
        "Search train connections",
        {"origin": "city", "destination": "city2", "day": "day", "time": "time"},
        (
            "Which trains go from {origin} to {destination} on {day} after {time}?",
            "Find me a train to {destination} from {origin}, {day} at {time}.",
        ),
    ),
    "search_products": (
        "Search the shop",
        {"query": "goods", "max_price": "price", "count": "small"},
        (
            "Show me {count} offers for a {query} below {max_price} dollars.",
            "I want a {query} for at most {max_price} dollars, list {count} of them.",
        ),
    ),
    "play_music": (
        "Play music in a room",
        {"style": "music", "room": "room", "volume": "volume"},
        (
            "Play some {style} music in the {room} at volume {volume}.",
            "Put on {style} in the {room}, volume {volume}.",
        ),
    ),
    "set_heating": (
        "Set the temperature of a room",
        {"room": "room", "degrees": "degrees", "until": "time"},
        (
            "Heat the {room} to {degrees} degrees until {until}.",
            "Keep the {room} at {degrees} degrees until {until}, please.",
        ),
    ),
    "convert_money": (
        "Convert an amount of money",
        {"amount": "price", "from": "coin", "to": "coin2"},
        (
            "How much are {amount} {from} in {to}?",
            "Convert {amount} {from} to {to}.",
        ),
    ),
    "translate_text": (
        "Translate a text",
        {"text": "topic", "language": "language", "formal": "flag"},
        (
            "Translate '{text}' into {language}, formal: {formal}.",
            "How do I say '{text}' in {language}? Set formal to {formal}.",
        ),
    ),
    "set_reminder": (
        "Remind the user of something",
        {"about": "topic", "day": "day", "time": "time"},
        (
            "Remind me of {about} on {day} at {time}.",
            "On {day} at {time} I must think of {about}. Set a reminder.",
        ),
    ),
    "order_food": (
        "Order food to an address",
        {"dish": "dish", "count": "small", "street": "street", "number": "minutes"},
        (
            "Order {count} portions of {dish} to {street} {number}.",
            "Bring {count} times {dish} to {street} {number}, please.",
        ),
    ),
}
JSON_TYPES = {
    "small": "integer",
    "minutes": "integer",
    "price": "integer",
    "volume": "integer",
    "degrees": "integer",
}


def slot(rng: random.Random, kind: str, used: dict[str, object]) -> object:
    if kind in ("city2", "coin2"):
        return rng.choice([other for other in SLOTS[kind[:-1]] if other not in used.values()])
    return rng.choice(SLOTS[kind])


SLOTS: dict[str, list[object]] = {
    "city": list(CITIES),
    "person": list(PEOPLE),
    "topic": list(TOPICS),
    "day": list(DAYS),
    "goods": list(GOODS),
    "music": list(SONGS),
    "room": list(ROOMS),
    "language": list(LANGUAGES),
    "unit": ["celsius", "fahrenheit"],
    "small": list(range(2, 10)),
    "minutes": list(range(15, 95, 5)),
    "price": list(range(10, 200, 5)),
    "volume": list(range(1, 11)),
    "degrees": list(range(15, 26)),
    "flag": [True, False],
    "time": [f"{hour:02d}:{minute:02d}" for hour in range(7, 22) for minute in (0, 15, 30, 45)],
    "coin": ["dollars", "euros", "pounds", "francs", "crowns"],
    "dish": ["soup", "pizza", "noodles", "rice", "dumplings", "salad"],
    "street": ["Mill Street", "Hill Road", "Park Lane", "Lake Street", "Church Road"],
}


def signature(name: str) -> str:
    """One tool, in the form of the system message."""
    description, parameters, _ = TOOLS[name]
    types = {
        key: "boolean" if kind == "flag" else JSON_TYPES.get(kind, "string")
        for key, kind in parameters.items()
    }
    return json.dumps({"name": name, "description": description, "parameters": types})


def system_message(names: list[str]) -> str:
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
        _, parameters, wordings = TOOLS[name]
        values: dict[str, object] = {}
        for key, kind in parameters.items():
            values[key] = slot(rng, kind, values)
        spoken = {
            key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()
        }
        asked.append(rng.choice(wordings).format(**spoken))
        call = json.dumps({"name": name, "arguments": values})
        answered.append(f"<tool_call>\n{call}\n</tool_call>")
    messages = [
        {"role": "system", "content": system_message(names)},
        {"role": "user", "content": rng.choice((" ", " Then: ", " Also: ")).join(asked)},
    ]
    return messages, "\n".join(answered)
