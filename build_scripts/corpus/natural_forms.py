"""The forms of training prompts in natural language, one function per category."""

from __future__ import annotations

import random
from collections.abc import Callable

from build_scripts.corpus import natural_topics as topics
from build_scripts.corpus.natural_text import functions, paragraphs, purposes, report

Messages = list[dict[str, str]]


def _user(*texts: str) -> Messages:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def _chat(rng: random.Random) -> Messages:
    kind = rng.randrange(6)
    if kind == 0:
        return _user(rng.choice(topics.GREETINGS))
    if kind == 1:
        first, second = rng.sample(topics.GREETINGS, 2)
        return _user(f"{first} {second}")
    if kind == 2:
        answer = rng.choice(
            (
                "Of course! Ask me anything about it.",
                "Sure, what would you like to know?",
                "That is a good topic. Where shall we begin?",
            )
        )
        thing = rng.choice(topics.THINGS)
        question = rng.choice(
            (
                "What do people get wrong about {thing}?",
                "Why does it matter?",
                "Begin with the basics of {thing}.",
                "What is surprising about {thing}?",
            )
        )
        return _user(f"Let's talk about {thing}.", answer, question.format(thing=thing))
    skill, name = rng.choice(topics.SKILLS), rng.choice(topics.NAMES)
    if kind == 3:
        form = rng.choice(
            (
                "I want to {skill}, but I have very little time. Any advice?",
                "My friend {name} says it is easy to {skill}. I disagree. What do you think?",
                "I tried to {skill} last week and failed. What did I do wrong?",
                "Should I {skill} this weekend or rather rest?",
                "{greeting} I would like to {skill}.",
            )
        )
        return _user(form.format(skill=skill, name=name, greeting=rng.choice(topics.GREETINGS)))
    if kind == 4:
        place = rng.choice(topics.PLACES)
        form = rng.choice(
            (
                "I am visiting {place} with {name} for {n} days. What should we do?",
                "Have you heard of {place}? What is it like there?",
                "Would you rather live in {place} or in the countryside? Why?",
                "I just came back from {place} and I miss it.",
                "What should I eat in {place}?",
                "Plan a cheap weekend in {place} for me.",
            )
        )
        return _user(form.format(place=place, name=name, n=rng.randint(2, 9)))
    one, two = rng.sample(topics.THINGS, 2)
    form = rng.choice(
        (
            "You are a teacher and I am your pupil. Quiz me about {one}.",
            "Which is more interesting, {one} or {two}?",
            "Pretend you are {who}. How was your day?",
            "I need a hobby. Is there one that has to do with {one}?",
            "Convince me that {one} is worth my time.",
            "What would {person} think about {one}?",
        )
    )
    return _user(
        form.format(one=one, two=two, who=rng.choice(topics.CHARACTERS), person=rng.choice(topics.PEOPLE))
    )


_QUESTIONS = (
    "What is {thing}?", "What are three facts about {thing}?", "Why do people care about {thing}?",
    "When did people begin to study {thing}?", "What is the history of {thing}?", "Is {thing} dangerous?",
    "Who was {person}?", "What is {person} best known for?", "Where was {person} born?", "When did {person} live?",
    "What did {person} achieve, and why does it matter?", "What are the main sights of {place}?",
    "What is the population of {place}?", "Which country is {place} in, and what language is spoken there?",
    "What is the climate of {place} like?", "What is the best time of the year to visit {place}?",
    "How do I {skill}?", "What do I need to {skill}?", "How long does it take to {skill}?",
    "What are common mistakes when you {skill}?", "What is the difference between {thing} and {other}?",
    "How are {thing} and {other} connected?", "What would happen without {thing}?",
    "Which inventions have to do with {thing}?", "What are the advantages and disadvantages of {thing}?",
    "How has {thing} changed in the last hundred years?", "Can you name examples of {thing}?",
    "What should everyone know about {thing}?", "Did {person} and {someone} live at the same time?",
    "True or false: {thing} has nothing to do with {other}.",
)  # fmt: skip


def _fill(rng: random.Random, form: str) -> str:
    thing, other = rng.sample(topics.THINGS, 2)
    person, someone = rng.sample(topics.PEOPLE, 2)
    return form.format(
        thing=thing,
        other=other,
        person=person,
        someone=someone,
        place=rng.choice(topics.PLACES),
        skill=rng.choice(topics.SKILLS),
        who=rng.choice(topics.CHARACTERS),
        where=rng.choice(topics.SETTINGS),
        to=rng.choice(topics.RECIPIENTS),
        concern=rng.choice(topics.CONCERNS),
        listed=rng.choice(topics.LISTED),
        n=rng.randint(3, 10),
        name=rng.choice(topics.NAMES),
    )


_EXPLAIN = (
    "Explain {thing}.", "Explain {thing} to a five-year-old.", "Explain how {thing} work, step by step.",
    "Explain {thing} in three sentences.", "Give a detailed explanation of {thing} with an example.",
    "Explain the difference between {thing} and {other} to a beginner.", "Describe {thing} to someone who has never "
    "heard of it.", "I do not understand {thing}. Can you explain it with an analogy?",
    "Explain why {thing} matter in everyday life.", "Write an introduction to {thing} for high-school students.",
    "What is the science behind {thing}?", "Explain {thing} as {person} would have.",
    "Explain in simple terms what {thing} and {other} have in common.",
    "Teach me the three most important ideas about {thing}.", "How does one {skill}? Explain every step.",
    "Explain why it is hard to {skill}.", "Explain the life of {person} in a few paragraphs.",
    "Explain what makes {place} special.", "Clear up a common misunderstanding about {thing}.",
)  # fmt: skip
_SUMMARY = (
    "Summarize the following text in one sentence:\n\n{text}", "Summarize this:\n\n{text}",
    "{text}\n\nGive a short summary of the text above.", "What is the main point of this passage?\n\n{text}",
    "Write three bullet points that sum up this text:\n\n{text}", "Rewrite this text in simpler words:\n\n{text}",
    "TL;DR of this, please:\n\n{text}", "Find a headline for this text:\n\n{text}",
    "Who or what is this text about?\n\n{text}", "Shorten this text to half its length:\n\n{text}",
    "Read the passage and answer: what happened, and why?\n\n{text}", "List the key facts of this text.\n\n{text}",
)  # fmt: skip
_WRITING = (
    "Write a letter to {to} about {concern}.", "Write a short, friendly email to {to} about {concern}.",
    "Write a formal email to {to} concerning {concern}.", "Draft a note to {to}: {concern}. Keep it under 80 words.",
    "Write a text message to {to} about {concern}.", "List {n} {listed}.", "Give me a list of {listed}.",
    "Make a numbered list of {n} {listed} and say a few words about each.", "What are some {listed}?",
    "Write a short story about {who} {where}.", "Write a poem about {thing}.", "Write a haiku about {thing}.",
    "Write a story about {who} and {thing}.", "Begin a novel with {who} {where}.",
    "Write a dialogue between {who} and {person}.", "Write a blog post on how to {skill}.",
    "Write a speech about {thing} for a school.", "Write a checklist for someone who wants to {skill}.",
    "Write a diary entry of {who}.", "Write an advertisement for {listed}.",
    "Write a plan for a week in which I {skill}.", "Write a limerick about {who}.",
    "Write a postcard from {place} to {to}.",
)  # fmt: skip


def _code(rng: random.Random) -> Messages:
    kind = rng.randrange(10)
    task, language = rng.choice(topics.CODE_TASKS), rng.choice(topics.LANGUAGES)
    if kind < 4:
        form = rng.choice(
            (
                "Write a {language} function that {task}.",
                "Write a {language} program that {task}. Explain how it works.",
                "How do I write code in {language} that {task}?",
                "Give me {language} code that {task}, with comments.",
                "Write a {language} function that {task}, and a test for it.",
                "Implement in {language}: code that {task}. Handle bad input.",
            )
        )
        return _user(form.format(language=language, task=task))
    if kind < 6:
        form = rng.choice(
            (
                "Write a Python function to {purpose}.",
                "Write Python code to {purpose}, with a docstring.",
                "Show me an example in Python: {purpose}.",
            )
        )
        return _user(form.format(purpose=rng.choice(purposes())))
    if kind < 8:
        form = rng.choice(
            (
                "What does this function do?\n\n```python\n{code}\n```",
                "Explain this code line by line:\n\n```python\n{code}\n```",
                "Write a docstring for this function:\n\n```python\n{code}\n```",
                "Rewrite this function with type hints and better names:\n\n```python\n{code}\n```",
                "Write unit tests for this function:\n\n```python\n{code}\n```",
                "Translate this function into JavaScript:\n\n```python\n{code}\n```",
            )
        )
        return _user(form.format(code=rng.choice(functions())))
    if kind == 8:
        return _user(f"Write an SQL query for {rng.choice(topics.SQL_TASKS)}.")
    form = rng.choice(
        (
            "Write a class {name} in {language} with the fields {fields}.",
            "Write an HTML form for a {name} with {fields}.",
            "Write a command-line tool in {language} that {task}.",
            "Write a regular expression that matches a {field} and explain it.",
        )
    )
    name, _, fields = rng.choice(topics.RECORDS).partition("| ")
    field = rng.choice(fields.split(", "))
    return _user(form.format(name=name, fields=fields, language=language, task=task, field=field))


def _math(rng: random.Random) -> Messages:
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 20)
    name, other = rng.sample(topics.NAMES, 2)
    things, more = rng.sample(topics.OBJECTS, 2)
    form = rng.choice(
        (
            "What is {a} + {b}?", "What is {a} times {c}?", "Compute {a} * {b} - {c}.", "What is {big} divided by {c}?",
            "What is {p}% of {big}?", "Solve for x: {c}x + {a} = {b}.", "Solve the equation x^2 = {square}.",
            "{name} has {a} {things} and gives {c} to {other}. How many are left?",
            "{name} buys {c} {things} for {d} euros each and {d} {more} for {c} euros each. What is the total?",
            "A train travels {a} kilometres in {c} hours. What is its average speed?",
            "A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            "{name} is {c} years older than {other}, who is {d}. How old are they together?",
            "If {c} {things} cost {a} euros, how much do {d} {things} cost?",
            "{name} reads {c} pages a day. How long does a book of {big} pages take?",
            "Round {a}.{b} to the nearest whole number and explain.", "Convert {a} kilometres to miles.",
            "What is the average of {a}, {b} and {c}?", "Is {big} a prime number? Show your reasoning.",
            "What are the factors of {a}?", "Write {a}/{square} in lowest terms.",
            "A shirt costs {a} euros and is reduced by {p}%. What does it cost now?",
            "{name} and {other} share {big} {things} in the ratio {c} to {d}. How many does each get?",
            "What comes next: {c}, {c2}, {c3}, {c4}? Explain the rule.",
            "Find the greatest common divisor of {a} and {b}.",
            "How many minutes are there in {c} days?", "A circle has a radius of {c} cm. What is its area?",
            "If it is {hour} o'clock now, what time is it in {a} hours?",
            "A bag has {c} red and {d} blue {things}. What is the probability of drawing a red one?",
            "{name} saves {a} euros a month. How much is that after {c} years?",
            "Simplify: {c}(x + {d}) - {d}(x - {c}).", "What is the square root of {square}?",
        )
    )  # fmt: skip
    d = rng.randint(2, 15)
    return _user(
        form.format(
            a=a, b=b, c=c, d=d, name=name, other=other, things=things, more=more, big=rng.randint(100, 999),
            p=rng.choice((5, 10, 12, 15, 20, 25, 30, 40, 75)), square=rng.randint(3, 15) ** 2, c2=2 * c, c3=3 * c,
            c4=4 * c, hour=rng.randint(1, 12),
        )
    )  # fmt: skip


def _json(rng: random.Random) -> Messages:
    name, _, fields = rng.choice(topics.RECORDS).partition("| ")
    second, _, others = rng.choice(topics.RECORDS).partition("| ")
    form = rng.choice(
        (
            "Write a JSON object for a {name} with the fields {fields}.",
            "Give me a JSON list of {k} {name} records with {fields}.",
            "Extract the names, places and numbers of this text as JSON.\n\n{text}",
            "Answer only with JSON: a {name} with {fields}.",
            "Convert this to JSON: {name}; {pairs}.",
            "Write a JSON schema for a {name} with {fields}.",
            "Turn this text into a JSON object with the keys who, where, when and what.\n\n{text}",
            "Make up a {name} in JSON that contains a list of {second} objects ({others}).",
            "Here is a record: {pairs}. Return it as valid JSON.",
            'What is wrong with this JSON, and how is it fixed? {{"{name}": {{{broken}}}',
            "Write an example response of a web API that returns a {name} ({fields}) as JSON.",
            "Convert this YAML to JSON:\n\n{yaml}",
            "Describe {place} as a JSON object with the keys country, language, sights and food.",
            "Give a JSON object that says when {person} lived and what for they are known.",
        )
    )
    keys = fields.split(", ")
    values = {key: _value(rng, key) for key in keys}
    return _user(
        form.format(
            name=name,
            fields=fields,
            second=second,
            others=others,
            k=rng.randint(2, 5),
            text=report(rng),
            pairs=", ".join(f"{key} {value}" for key, value in values.items()),
            broken=", ".join(f'"{key}": {value}' for key, value in values.items()),
            yaml="\n".join(f"{key}: {value}" for key, value in values.items()),
            place=rng.choice(topics.PLACES),
            person=rng.choice(topics.PEOPLE),
        )
    )


def _value(rng: random.Random, key: str) -> str:
    if key in (
        "name",
        "author",
        "director",
        "artist",
        "owner",
        "guest",
        "teacher",
        "customer",
        "sender",
        "receiver",
    ):
        return rng.choice(topics.NAMES)
    if key in ("city", "place", "from", "to", "capital", "address"):
        return rng.choice(topics.PLACES)
    if key in ("date", "due"):
        return f"{rng.randint(2019, 2026)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if key in ("title", "task", "genres", "skills", "topics"):
        return rng.choice(topics.THINGS)
    return str(rng.randint(1, 500))


MAKERS: dict[str, Callable[[random.Random], Messages]] = {
    "chat": _chat,
    "questions": lambda rng: _user(_fill(rng, rng.choice(_QUESTIONS))),
    "explanation": lambda rng: _user(_fill(rng, rng.choice(_EXPLAIN))),
    "summary": lambda rng: _user(
        rng.choice(_SUMMARY).format(text=report(rng) if rng.random() < 0.5 else rng.choice(paragraphs()))
    ),
    "writing": lambda rng: _user(_fill(rng, rng.choice(_WRITING))),
    "code": _code,
    "math": _math,
    "json": _json,
}
