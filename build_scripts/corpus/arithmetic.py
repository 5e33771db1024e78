"""Arithmetic word problems with small numbers, answered step by step."""

from __future__ import annotations

import random
from collections.abc import Callable

from build_scripts.corpus import entries

NAMES = entries("""
Maya; Leo; Nina; Omar; Ruth; Ivan; Tara; Hugo; Lena; Sami; Cora; Felix; Dina; Paul; Zoe; Adam; Mila; Noah; Elsa;
Karl; Rosa; Theo; Anna; Ben; Clara; David; Emma; Frank; Gina; Henry
""")
ITEMS = entries("""
apples; marbles; stickers; books; pencils; coins; shells; cards; stamps; buttons; oranges; plums; flowers;
candles; postcards; ribbons; bottles; cups; stones; beads; cookies; tickets
""")
PLACES = ("market", "shop", "library", "school fair", "bakery", "garden", "museum", "station")
CLOSINGS = (
    "How many {item} does {name} have in the end?",
    "How many {item} does {name} have now?",
    "Find the number of {item} that {name} has at the end.",
)
Steps = list[str]


def product(a: int, b: int) -> str:
    """`a * b = ...`. The larger factor is split into tens and ones if that helps."""
    small, large = sorted((a, b))
    tens, ones = large // 10 * 10, large % 10
    if large <= 12 or ones == 0:
        return f"{small} * {large} = {small * large}"
    parts = f"{small} * {tens} + {small} * {ones} = {small * tens} + {small * ones}"
    return f"{small} * {large} = {parts} = {small * large}"


def chain(rng: random.Random) -> tuple[str, Steps, str]:
    """An amount that a few events change, one after another."""
    name, item, place = rng.choice(NAMES), rng.choice(ITEMS), rng.choice(PLACES)
    friend = rng.choice([other for other in NAMES if other != name])
    amount = rng.randint(5, 60)
    told = [rng.choice(("{n} has {a} {i}.", "{n} starts with {a} {i}.", "At first {n} has {a} {i}."))]
    told[0] = told[0].format(n=name, a=amount, i=item)
    steps = [f"{name} starts with {amount} {item}."]
    for _ in range(rng.randint(2, 4)):
        kind = rng.choice(("buy", "gift", "lose", "packs", "double", "give"))
        if kind in ("buy", "gift"):
            more = rng.randint(2, 40)
            told.append(
                f"{name} buys {more} more {item} at the {place}."
                if kind == "buy"
                else f"{friend} gives {name} {more} {item}."
            )
            steps.append(f"Add {more}: {amount} + {more} = {amount + more} {item}.")
            amount += more
        elif kind in ("lose", "give") and amount > 6:
            less = rng.randint(2, min(amount - 2, 40))
            told.append(
                f"{name} loses {less} {item}."
                if kind == "lose"
                else f"{name} gives {less} {item} to {friend}."
            )
            steps.append(f"Take away {less}: {amount} - {less} = {amount - less} {item}.")
            amount -= less
        elif kind == "packs":
            packs, each = rng.randint(2, 9), rng.randint(2, 12)
            told.append(f"Then {name} gets {packs} packs with {each} {item} in each.")
            steps.append(f"The packs hold {product(packs, each)} {item}.")
            steps.append(f"Add them: {amount} + {packs * each} = {amount + packs * each} {item}.")
            amount += packs * each
        elif amount < 80:
            told.append(f"After that {name} doubles the number of {item}.")
            steps.append(f"Double it: {product(2, amount)} {item}.")
            amount *= 2
    told.append(rng.choice(CLOSINGS).format(item=item, name=name))
    return " ".join(told), steps, f"{amount} {item}"


def shopping(rng: random.Random) -> tuple[str, Steps, str]:
    name = rng.choice(NAMES)
    first, second = rng.sample(ITEMS, 2)
    count1, count2, price1, price2 = (
        rng.randint(2, 9),
        rng.randint(2, 9),
        rng.randint(2, 15),
        rng.randint(2, 15),
    )
    cost1, cost2 = count1 * price1, count2 * price2
    total = cost1 + cost2
    paid = (total // 50 + 1) * 50
    asked = rng.choice(
        (
            f"{name} buys {count1} {first} at {price1} dollars each and {count2} {second} at {price2} dollars each. "
            f"{name} pays with {paid} dollars. How much change does {name} get?",
            f"At the {rng.choice(PLACES)}, {first} cost {price1} dollars each and {second} cost {price2} dollars each. "
            f"{name} takes {count1} {first} and {count2} {second} and pays {paid} dollars. How much money is left?",
        )
    )
    steps = [
        f"The {first} cost {product(count1, price1)} dollars.",
        f"The {second} cost {product(count2, price2)} dollars.",
        f"Together they cost {cost1} + {cost2} = {total} dollars.",
        f"The change is {paid} - {total} = {paid - total} dollars.",
    ]
    return asked, steps, f"{paid - total} dollars"


def journey(rng: random.Random) -> tuple[str, Steps, str]:
    name = rng.choice(NAMES)
    vehicle = rng.choice(("train", "bus", "car", "boat", "bicycle"))
    speed1, hours1, speed2, hours2 = (
        rng.randint(8, 60),
        rng.randint(2, 6),
        rng.randint(8, 60),
        rng.randint(2, 6),
    )
    far1, far2 = speed1 * hours1, speed2 * hours2
    asked = rng.choice(
        (
            f"A {vehicle} travels at {speed1} km per hour for {hours1} hours and then at {speed2} km per hour for "
            f"{hours2} hours. How far does it travel in total?",
            f"{name} takes a {vehicle} that goes {speed1} km per hour for {hours1} hours. After a rest it goes "
            f"{speed2} km per hour for {hours2} hours. What is the total distance?",
        )
    )
    steps = [
        f"In the first part it covers {product(hours1, speed1)} km.",
        f"In the second part it covers {product(hours2, speed2)} km.",
        f"The total distance is {far1} + {far2} = {far1 + far2} km.",
    ]
    return asked, steps, f"{far1 + far2} km"


def rectangle(rng: random.Random) -> tuple[str, Steps, str]:
    what = rng.choice(("garden", "room", "field", "carpet", "yard", "wall"))
    width, length, price = rng.randint(3, 12), rng.randint(4, 30), rng.randint(2, 9)
    around, area = 2 * (width + length), width * length
    if rng.random() < 0.5:
        asked = rng.choice(
            (
                f"A {what} is {length} m long and {width} m wide. A fence costs {price} dollars per metre. "
                "How much does a fence around it cost?",
                f"A fence goes all the way around a {what} of {length} m by {width} m. "
                f"One metre costs {price} dollars. What is the price of the whole fence?",
            )
        )
        steps = [
            f"Length and width together are {length} + {width} = {length + width} m.",
            f"The way around is {product(2, length + width)} m.",
            f"The fence costs {product(price, around)} dollars.",
        ]
        return asked, steps, f"{around * price} dollars"
    asked = rng.choice(
        (
            f"A {what} is {length} m long and {width} m wide. Paint costs {price} dollars per square metre. "
            "How much does it cost to paint it?",
            f"What does it cost to paint a {what} of {length} m by {width} m, "
            f"when one square metre costs {price} dollars?",
        )
    )
    steps = [
        f"The area is {product(width, length)} square metres.",
        f"The paint costs {product(price, area)} dollars.",
    ]
    return asked, steps, f"{area * price} dollars"


def sharing(rng: random.Random) -> tuple[str, Steps, str]:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    friends, each, extra = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 20)
    shared = friends * each
    total = shared + extra
    asked = rng.choice(
        (
            f"{name} has {total} {item}, keeps {extra} and shares the rest equally among {friends} friends. "
            f"How many {item} does each friend get?",
            f"There are {total} {item} in a box. {name} takes {extra} of them. The others are divided equally among "
            f"{friends} children. How many {item} does each child get?",
        )
    )
    steps = [
        f"First take away the {extra}: {total} - {extra} = {shared} {item} are shared.",
        f"Divide them by {friends}: {shared} / {friends} = {each} {item}.",
        f"Check: {product(friends, each)}, and {shared} + {extra} = {total}.",
    ]
    return asked, steps, f"{each} {item}"


def average(rng: random.Random) -> tuple[str, Steps, str]:
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    count = rng.choice((3, 4, 5))
    mean = rng.randint(6, 30)
    numbers = [mean + rng.randint(-5, 5) for _ in range(count - 1)]
    numbers.append(mean * count - sum(numbers))
    if numbers[-1] <= 0:
        return average(rng)
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")[:count]
    listed = ", ".join(f"{number} on {day}" for number, day in zip(numbers, days, strict=True))
    asked = rng.choice(
        (
            f"{name} collects {item}: {listed}. What is the average per day?",
            f"{name} counts the {item} sold each day: {listed}. How many {item} are sold per day on average?",
        )
    )
    running, steps = numbers[0], [f"Start with {numbers[0]}."]
    for number in numbers[1:]:
        steps.append(f"Add {number}: {running} + {number} = {running + number}.")
        running += number
    steps.append(f"Divide by the {count} days: {running} / {count} = {mean}.")
    return asked, steps, f"{mean} {item} per day"


def ages(rng: random.Random) -> tuple[str, Steps, str]:
    first, second, third = rng.sample(NAMES, 3)
    age, times, older = rng.randint(3, 15), rng.randint(2, 4), rng.randint(2, 15)
    asked = (
        f"{first} is {age} years old. {second} is {times} times as old as {first}. "
        f"{third} is {older} years older than {second}. "
    ) + rng.choice(("How old are the three together?", "What is the sum of their ages?"))
    age2 = age * times
    age3 = age2 + older
    steps = [
        f"{second} is {product(times, age)} years old.",
        f"{third} is {age2} + {older} = {age3} years old.",
        f"{first} and {second} together are {age} + {age2} = {age + age2} years old.",
        f"All three together are {age + age2} + {age3} = {age + age2 + age3} years old.",
    ]
    return asked, steps, f"{age + age2 + age3} years"


def saving(rng: random.Random) -> tuple[str, Steps, str]:
    name, item = (
        rng.choice(NAMES),
        rng.choice(("bicycle", "guitar", "tent", "lamp", "camera", "coat", "radio")),
    )
    week, weeks, gift = rng.randint(3, 15), rng.randint(3, 12), rng.randint(5, 40)
    saved = week * weeks
    price = saved + gift + rng.randint(5, 60)
    asked = rng.choice(
        (
            f"{name} saves {week} dollars a week for {weeks} weeks and gets {gift} dollars as a present. "
            f"A {item} costs {price} dollars. How much money is missing?",
            f"A {item} costs {price} dollars. {name} saves {week} dollars every week for {weeks} weeks, "
            f"and an aunt adds {gift} dollars. How many dollars does {name} still need?",
        )
    )
    steps = [
        f"In {weeks} weeks {name} saves {product(week, weeks)} dollars.",
        f"With the {gift} dollars that is {saved} + {gift} = {saved + gift} dollars.",
        f"Still missing are {price} - {saved + gift} = {price - saved - gift} dollars.",
    ]
    return asked, steps, f"{price - saved - gift} dollars"


PROBLEMS: tuple[Callable[[random.Random], tuple[str, Steps, str]], ...] = (
    *(chain, chain, chain, shopping, journey, rectangle, sharing, average, ages, saving),
)


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages and the worked answer of one word problem."""
    asked, steps, result = rng.choice(PROBLEMS)(rng)
    listed = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    return [{"role": "user", "content": asked}], f"Let us go step by step.\n{listed}\nThe answer is {result}."
