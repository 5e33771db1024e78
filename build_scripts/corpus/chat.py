"""Questions and answers about a closed world: invented towns on invented islands, so that no real fact is involved."""

from __future__ import annotations

import random

from build_scripts.corpus import entries

ISLANDS = ("Ostra", "Velm", "Karun", "Tesby", "Molin", "Hadra")
TOWNS = entries(
    "Arlen; Borvik; Calden; Dorrin; Eskara; Fenwold; Galmar; Hestin; Ilvane; Jorby; Kelmar; Lunden; Marrow; Nesby; "
    "Orlin; Pellan; Quarn; Rostel; Sellin; Torva; Ulmer; Vasker; Wendle; Yarrow; Zelmo; Ashby; Brinna; Corvel"
)
MAYORS = entries("Ada; Birk; Celia; Dorn; Edda; Finn; Greta; Holm; Ines; Jarl; Kira; Lund; Mona; Nils; Olga")
SIGHTS = entries(
    "a tall white lighthouse; an old stone bridge; a large glass market; hot springs; a museum of clocks; a garden of "
    "roses; a school for sailors; red sandstone cliffs; a tower with seven bells; a lake full of swans"
)
TRADES = entries(
    "fishing; weaving; boat building; pottery; bee keeping; growing tea; glass blowing; printing"
)
DISHES = entries(
    "fish soup; apple pie; bean stew; rye bread; mussel rice; honey cake; goat cheese; plum dumplings"
)
# A topic of a town: how it is asked about, what a comparison calls it, and the fact.
FACTS = {
    "people": ("how many people live in {name}", "size", "About {people} people live in {name}."),
    "founded": ("when {name} was founded", "age", "{name} was founded in the year {founded}."),
    "mayor": ("who the mayor of {name} is", "mayor", "The mayor of {name} is called {mayor}."),
    "sight": ("what there is to see in {name}", "sights", "{name} is famous for {sight}."),
    "trade": ("what people in {name} do for a living", "trade", "Most families in {name} live from {trade}."),
    "dish": ("what people eat in {name}", "food", "The dish to try in {name} is {dish}."),
}
OPENINGS = ("Please tell me {q}.", "I would like to know {q}.", "Can you tell me {q}?", "Do you know {q}?")
Town = dict[str, str]


def _world() -> tuple[Town, ...]:
    rng = random.Random("the islands")
    return tuple(
        {
            "name": name,
            "island": ISLANDS[number % len(ISLANDS)],
            "people": str(rng.randint(2, 48) * 500),
            "founded": str(rng.randint(120, 179) * 10),
            "mayor": rng.choice(MAYORS),
            "sight": rng.choice(SIGHTS),
            "trade": rng.choice(TRADES),
            "dish": rng.choice(DISHES),
        }
        for number, name in enumerate(TOWNS)
    )


WORLD = _world()


def told(town: Town, keys: list[str]) -> str:
    """Where the town is, and these facts of it."""
    facts = [f"{town['name']} is a town on the island of {town['island']}."]
    return " ".join([*facts, *(FACTS[key][2].format(**town) for key in keys)])


def describe(rng: random.Random) -> tuple[str, str]:
    """Some facts of a town."""
    town, keys = rng.choice(WORLD), rng.sample(list(FACTS), rng.randint(2, 4))
    asked = [FACTS[key][0].format(**town) for key in keys]
    question = rng.choice(OPENINGS).format(q=", ".join(asked[:-1]) + " and " + asked[-1])
    return question, told(town, keys)


def portrait(rng: random.Random) -> tuple[str, str]:
    """All facts of a town but one."""
    town, left_out = rng.choice(WORLD), rng.choice(list(FACTS))
    asked = rng.choice(
        ("Write a short text about {n}", "Give me a portrait of {n}", "Describe the town of {n}")
    )
    question = f"{asked.format(n=town['name'])}, but leave out its {FACTS[left_out][1]}."
    return question, told(town, [key for key in FACTS if key != left_out])


def comparison(rng: random.Random) -> tuple[str, str]:
    """Two facts of two towns."""
    towns, keys = rng.sample(WORLD, 2), rng.sample(list(FACTS), 2)
    one, two = (town["name"] for town in towns)
    about = " and ".join(FACTS[key][1] for key in keys)
    return f"Compare {one} and {two} by {about}.", " ".join(told(town, keys) for town in towns)


def visit(rng: random.Random) -> tuple[str, str]:
    """A plan for a day in each of some towns."""
    towns = rng.sample(WORLD, rng.randint(2, 3))
    names = ", ".join(town["name"] for town in towns[:-1]) + " and " + towns[-1]["name"]
    days = [
        f"On the {day} day you are in {town['name']} on the island of {town['island']}: see {town['sight']} and eat "
        f"{town['dish']}."
        for day, town in zip(("first", "second", "third"), towns, strict=False)
    ]
    question = f"We have {len(towns)} days for {names}. What should we do?"
    return question, " ".join([f"Here is a plan for {len(towns)} days.", *days])


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages of one or two turns and the last answer."""
    asked, answer = rng.choice((describe, describe, portrait, comparison, comparison, visit))(rng)
    messages = [{"role": "user", "content": asked}]
    if rng.random() < 0.2:
        messages.append({"role": "assistant", "content": answer})
        asked, answer = rng.choice((describe, portrait))(rng)
        messages.append({"role": "user", "content": rng.choice(("Thank you. ", "And now: ", "")) + asked})
    return messages, answer
