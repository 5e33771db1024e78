"""Arithmetic word problems with small numbers, answered step by step."""

from __future__ import annotations

import random

from build_scripts.corpus import entries

NAMES = entries(
    "Maya; Leo; Nina; Omar; Ruth; Ivan; Tara; Hugo; Lena; Sami; Cora; Felix; Dina; Paul; Zoe; Adam; Mila"
)
ITEMS = entries(
    "apples; marbles; stickers; books; pencils; coins; shells; cards; stamps; buttons; plums; flowers"
)
PLACES = entries("market; shop; library; school fair; bakery; garden; museum; station")
# What changes an amount: told to the reader, and the sign of the change.
EVENTS = (
    ("{name} buys {n} more {item} at the {place}.", 1),
    ("{friend} gives {name} {n} {item}.", 1),
    ("{name} loses {n} {item}.", -1),
    ("{name} gives {n} {item} to {friend}.", -1),
)
Problem = tuple[str, list[str], str]  # the question, the steps and the result


def product(a: int, b: int) -> str:
    """`a * b = ...`. The larger factor is split into tens and ones if that helps."""
    small, large = sorted((a, b))
    tens, ones = large // 10 * 10, large % 10
    if large <= 12 or ones == 0:
        return f"{small} * {large} = {small * large}"
    parts = f"{small} * {tens} + {small} * {ones} = {small * tens} + {small * ones}"
    return f"{small} * {large} = {parts} = {small * large}"


def chain(rng: random.Random) -> Problem:
    """An amount that a few events change, one after another."""
    (name, friend), item, place = rng.sample(NAMES, 2), rng.choice(ITEMS), rng.choice(PLACES)
    amount = rng.randint(5, 60)
    told, steps = [f"{name} has {amount} {item}."], [f"{name} starts with {amount} {item}."]
    for _ in range(rng.randint(2, 4)):
        if rng.random() < 0.3:
            packs, size = rng.randint(2, 9), rng.randint(2, 12)
            told.append(f"Then {name} gets {packs} packs with {size} {item} in each.")
            steps.append(f"The packs hold {product(packs, size)} {item}.")
            steps.append(f"Add them: {amount} + {packs * size} = {amount + packs * size} {item}.")
            amount += packs * size
            continue
        event, sign = rng.choice(EVENTS if amount > 6 else EVENTS[:2])
        n = rng.randint(2, 40 if sign > 0 else min(amount - 2, 40))
        told.append(event.format(name=name, friend=friend, item=item, place=place, n=n))
        verb, mark = ("Add", "+") if sign > 0 else ("Take away", "-")
        steps.append(f"{verb} {n}: {amount} {mark} {n} = {amount + sign * n} {item}.")
        amount += sign * n
    told.append(
        rng.choice((f"How many {item} does {name} have now?", f"Find the number of {item} of {name}."))
    )
    return " ".join(told), steps, f"{amount} {item}"


def shopping(rng: random.Random) -> Problem:
    """The change of a purchase of two kinds of things."""
    name, (first, second) = rng.choice(NAMES), rng.sample(ITEMS, 2)
    count1, count2, price1, price2 = (rng.randint(2, 12) for _ in range(4))
    cost1, cost2 = count1 * price1, count2 * price2
    total = cost1 + cost2
    paid = (total // 50 + 1) * 50
    asked = (
        f"{name} buys {count1} {first} at {price1} dollars each and {count2} {second} at {price2} dollars each, "
        f"and pays with {paid} dollars. How much change does {name} get?"
    )
    steps = [
        f"The {first} cost {product(count1, price1)} dollars.",
        f"The {second} cost {product(count2, price2)} dollars.",
        f"Together they cost {cost1} + {cost2} = {total} dollars.",
        f"The change is {paid} - {total} = {paid - total} dollars.",
    ]
    return asked, steps, f"{paid - total} dollars"


def sharing(rng: random.Random) -> Problem:
    """Things that friends share equally."""
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    friends, share, extra = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 20)
    shared, total = friends * share, friends * share + extra
    asked = (
        f"{name} has {total} {item}, keeps {extra} and shares the rest equally among {friends} friends. "
        f"How many {item} does each friend get?"
    )
    steps = [
        f"First take away the {extra}: {total} - {extra} = {shared} {item} are shared.",
        f"Divide them by {friends}: {shared} / {friends} = {share} {item}.",
        f"Check: {product(friends, share)}, and {shared} + {extra} = {total}.",
    ]
    return asked, steps, f"{share} {item}"


def example(rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """Messages and the worked answer of one word problem."""
    asked, steps, result = rng.choice((chain, chain, shopping, sharing))(rng)
    listed = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    return [{"role": "user", "content": asked}], f"Let us go step by step.\n{listed}\nThe answer is {result}."
