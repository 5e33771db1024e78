"""Generated JSON schemas, and a check that every output parses, validates, and is the same with and without drafts.

The schemas are made from a seed: objects, arrays, strings with lengths, patterns and formats, bounded numbers, enums,
anyOf and references. Each is decoded plain and with drafts, greedy or sampled in turn. Every fourth request is JSON
without spaces.
"""

from __future__ import annotations

import json
import random
from typing import Any

from dflash_trt import LLM, Completion, SamplingParams, StructuredOutputs

WORDS = [
    "name", "age", "city", "price", "tags", "kind", "owner", "count", "colour", "size", "date", "id", "items",
]  # fmt: skip
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z][a-z]{1,8}$", "^[0-9]{3}-[0-9]{4}$", "^(red|green|blue)$")
# Not "date": RFC 3339 has a year 0000, which the checker of jsonschema refuses.
FORMATS = ("uuid", "ipv4", "ipv6")


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random JSON schema whose texts are short. `depth` is that of the value in its document."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "format", "number"]
    kinds += ["object", "array", "anyOf"] * 3 if depth < 2 else []
    kind = rng.choice(kinds) if depth else "object"
    if kind == "object":
        names = rng.sample(WORDS, rng.randint(1, 4))
        values = {name: schema(rng, depth + 1) for name in names}
        needed = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": values, "required": needed, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        items = schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    low = rng.randint(-1000, 1000)
    plain: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        "number": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": rng.sample([*WORDS, 1, 2.5, None, True], rng.randint(1, 4))},
        "const": {"const": rng.choice([*WORDS, 7, False])},
        "pattern": {"type": "string", "pattern": rng.choice(PATTERNS)},
        "format": {"type": "string", "format": rng.choice(FORMATS)},
    }
    return plain[kind]


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The same schemas for the same seed. Every fifth uses a reference."""
    made = []
    for i in range(count):
        one = schema(random.Random(f"{seed} {i}"))
        if i % 5 == 4:
            one = {"$defs": {"thing": one}, "type": "object", "properties": {"thing": {"$ref": "#/$defs/thing"}},
                   "required": ["thing"], "additionalProperties": False}  # fmt: skip
        made.append(one)
    return made


def parameters(index: int, form: dict[str, Any], max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=(0.0, 0.8)[index % 2],
        seed=index,
        structured_outputs=StructuredOutputs(json=form, disable_any_whitespace=index % 4 == 3),
    )


def faults(form: dict[str, Any], drafted: Completion, plain: Completion) -> str:
    """The fault of the outputs for a schema; "" if there is none."""
    import jsonschema

    if drafted.token_ids != plain.token_ids:
        return "drafts changed the tokens"
    if drafted.finish_reason != "stop":
        return f"ended by {drafted.finish_reason}: {drafted.text!r}"
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(form, format_checker=checker).validate(json.loads(drafted.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{drafted.text!r}: {error}"
    return ""


def conform(llm: LLM, forms: list[dict[str, Any]], prompt: str, max_tokens: int) -> dict[int, str]:
    """Decode all schemas with and without drafts. The faults, by number of the schema."""
    params = [parameters(i, form, max_tokens) for i, form in enumerate(forms)]
    drafted = llm.generate([prompt] * len(forms), params)
    plain = llm.generate([prompt] * len(forms), params, speculate=False)
    found = {i: faults(form, d, p) for i, (form, d, p) in enumerate(zip(forms, drafted, plain, strict=True))}
    return {i: fault for i, fault in found.items() if fault}
