"""Questions and answers about a closed world: invented towns on invented islands, so that no real fact is involved."""

from __future__ import annotations

import random
from dataclasses import dataclass

from build_scripts.corpus import entries

ISLANDS = ("Ostra", "Velm", "Karun", "Tesby", "Molin", "Hadra")
TOWNS = entries("""
Arlen; Borvik; Calden; Dorrin; Eskara; Fenwold; Galmar; Hestin; Ilvane; Jorby; Kelmar; Lunden; Marrow; Nesby;
Orlin; Pellan; Quarn; Rostel; Sellin; Torva; Ulmer; Vasker; Wendle; Yarrow; Zelmo; Ashby; Brinna; Corvel;
Drumlin; Elgar
""")
MAYORS = entries("""
Ada; Birk; Celia; Dorn; Edda; Finn; Greta; Holm; Ines; Jarl; Kira; Lund; Mona; Nils; Olga
""")
FAMOUS = entries("""
a tall white lighthouse; an old stone bridge; a large glass market; hot springs; a museum of clocks; a garden of
roses; a school for sailors; red sandstone cliffs; a tower with seven bells; a lake full of swans
""")
TRADES = entries("""
fishing; weaving; boat building; pottery; bee keeping; growing tea; glass blowing; printing
""")
FESTIVALS = ("lantern", "kite", "harvest", "music", "boat", "snow", "bread", "book")
MONTHS = entries("""
January; February; March; April; May; June; July; August; September; October; November; December
""")
DISHES = entries("""
fish soup; apple pie; bean stew; rye bread; mussel rice; honey cake; goat cheese; plum dumplings
""")


@dataclass(frozen=True, slots=True)
class Town:
    name: str
    island: str
    people: int
    founded: int
    mayor: str
    famous: str
    trade: str
    festival: str
    month: str
    dish: str


def _world() -> tuple[Town, ...]:
    rng = random.Random("the islands")
    return tuple(
        Town(
            *(name, ISLANDS[number % len(ISLANDS)], rng.randint(2, 48) * 500, rng.randint(120, 179) * 10),
            *(rng.choice(MAYORS), rng.choice(FAMOUS), rng.choice(TRADES), rng.choice(FESTIVALS)),
            *(rng.choice(MONTHS), rng.choice(DISHES)),
        )
        for number, name in enumerate(TOWNS)
    )


WORLD = _world()


def place(town: Town) -> str:
    return f"{town.name} is a town on the island of {town.island}."


FACTS: dict[str, tuple[tuple[str, ...], str]] = {
    "people": (
        ("how many people live in {t.name}", "how large {t.name} is"),
        "About {t.people} people live in {t.name}.",
    ),
    "founded": (
        ("when {t.name} was founded", "how old {t.name} is"),
        "{t.name} was founded in the year {t.founded}.",
    ),
    "mayor": (
        ("who the mayor of {t.name} is", "who leads {t.name}"),
        "The mayor of {t.name} is called {t.mayor}.",
    ),
    "famous": (
        ("what {t.name} is famous for", "what there is to see in {t.name}"),
        "{t.name} is famous for {t.famous}.",
    ),
    "trade": (
        ("what people in {t.name} do for a living", "which trade matters most in {t.name}"),
        "Most families in {t.name} live from {t.trade}.",
    ),
    "festival": (
        ("which festival {t.name} has", "when there is a festival in {t.name}"),
        "Every {t.month} the people of {t.name} hold the {t.festival} festival.",
    ),
    "dish": (
        ("what people eat in {t.name}", "which dish {t.name} is known for"),
        "The dish to try in {t.name} is {t.dish}.",
    ),
}
OPENINGS = (
    "Please tell me {q}.",
    "I would like to know {q}.",
    "Can you tell me {q}?",
    "Do you know {q}?",
    "Explain {q}.",
)


def fact(town: Town, key: str) -> str:
    return FACTS[key][1].format(t=town)


def joined(rng: random.Random, town: Town, keys: list[str]) -> str:
    asked = [rng.choice(FACTS[key][0]).format(t=town) for key in keys]
    text = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + " and " + asked[-1]
    return rng.choice(OPENINGS).format(q=text)


def describe(rng: random.Random) -> tuple[str, str]:
    town = rng.choice(WORLD)
    keys = rng.sample(sorted(FACTS), rng.randint(2, 4))
    return joined(rng, town, keys), " ".join([place(town), *(fact(town, key) for key in keys)])


def portrait(rng: random.Random) -> tuple[str, str]:
    town = rng.choice(WORLD)
    left_out = rng.choice(sorted(FACTS))
    asked = rng.choice(
        ("Write a short text about {n}", "Give me a portrait of {n}", "Describe the town of {n}")
    )
    without = {
        "people": "its size",
        "founded": "its age",
        "mayor": "its mayor",
        "famous": "its sights",
        "trade": "its trade",
        "festival": "its festival",
        "dish": "its food",
    }[left_out]
    told = [place(town), *(fact(town, key) for key in FACTS if key != left_out)]
    return f"{asked.format(n=town.name)}, but leave out {without}.", " ".join(told)


def comparison(rng: random.Random) -> tuple[str, str]:
    one, two = rng.sample(WORLD, 2)
    keys = rng.sample(("founded", "people", "dish", "trade", "famous"), 2)
    topics = {"founded": "age", "people": "size", "dish": "food", "trade": "trade", "famous": "sights"}
    about = " and ".join(topics[key] for key in keys)
    asked = rng.choice(
        (
            f"Compare {one.name} and {two.name} by {about}.",
            f"What is the difference between {one.name} and {two.name} in {about}?",
            f"I know neither {one.name} nor {two.name}. Compare their {about}.",
        )
    )
    told = [place(one), place(two)]
    for key in keys:
        told += [fact(one, key), fact(two, key)]
        if key == "people" and one.people != two.people:
            larger = one if one.people > two.people else two
            told.append(f"So {larger.name} is the larger town.")
        if key == "founded" and one.founded != two.founded:
            older = one if one.founded < two.founded else two
            told.append(f"So {older.name} is the older town.")
    return asked, " ".join(told)


def visit(rng: random.Random) -> tuple[str, str]:
    towns = rng.sample(WORLD, rng.randint(2, 3))
    names = ", ".join(town.name for town in towns[:-1]) + " and " + towns[-1].name
    days = ("first", "second", "third")
    asked = rng.choice(
        (
            f"I want to visit {names}. Make a plan for one day in each.",
            f"Plan a trip to {names}, one day per town.",
            f"We have {len(towns)} days for {names}. What should we do?",
        )
    )
    told = [f"Here is a plan for {len(towns)} days."]
    for day, town in zip(days, towns, strict=False):
        told.append(
            f"On the {day} day you are in {town.name} on the island of {town.island}: "
            f"see {town.famous} and eat {town.dish}."
        )
    return asked, " ".join(told)


def island(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(ISLANDS)
    key = rng.choice(sorted(FACTS))
    towns = [town for town in WORLD if town.island == name]
    chosen = rng.sample(towns, 3)
    listed = ", ".join(town.name for town in chosen)
    topic = {
        "people": "how large they are",
        "founded": "when they were founded",
        "mayor": "who leads them",
        "famous": "what they are famous for",
        "trade": "what people do there",
        "festival": "which festivals they have",
        "dish": "what people eat there",
    }[key]
    asked = rng.choice(
        (
            f"On the island of {name} there are {listed}. Tell me {topic}.",
            f"Take the towns {listed} on {name} and tell me {topic}.",
        )
    )
    return asked, " ".join(
        [f"These towns are on the island of {name}.", *(fact(town, key) for town in chosen)]
    )


KINDS = (describe, describe, portrait, comparison, comparison, visit, island)


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages of one or two turns and the last answer."""
    asked, told = rng.choice(KINDS)(rng)
    messages = [{"role": "user", "content": asked}]
    if rng.random() < 0.2:
        messages.append({"role": "assistant", "content": told})
        asked, told = rng.choice((describe, portrait))(rng)
        messages.append({"role": "user", "content": rng.choice(("Thank you. ", "And now: ", "")) + asked})
    return messages, told
