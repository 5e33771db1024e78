"""Generated JSON schemas: every output parses and validates, drafts change no token, and the speed with and without.

    python -m build_scripts.bench.structured BUNDLE [--schemas 500] [--batch 8] [--threads N]

Needs llguidance and jsonschema. The schemas are made from a seed: objects, arrays, strings with lengths, patterns and
formats, bounded numbers, enums, anyOf and references. Each is decoded plain and with drafts, greedy or sampled in
turn. Every fourth request is JSON without spaces. The speed compares four methods on the first schemas: plain and
drafted, with the schema and without it, with the same number of tokens each. The methods take turns. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from dflash_trt import LLM, Completion, SamplingParams, Statistics, StructuredOutputs
from dflash_trt.hardware import processor

WORDS = [
    "name",
    "age",
    "city",
    "price",
    "tags",
    "kind",
    "owner",
    "count",
    "colour",
    "size",
    "date",
    "id",
    "items",
]
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


def conform(llm: LLM, forms: list[dict[str, Any]], prompt: str, max_tokens: int) -> dict[str, Any]:
    """Decode all schemas twice. The faults by number of the schema, and the statistics of the drafted outputs."""
    params = [parameters(i, form, max_tokens) for i, form in enumerate(forms)]
    begin = perf_counter()
    drafted = llm.generate([prompt] * len(forms), params)
    middle = perf_counter()
    plain = llm.generate([prompt] * len(forms), params, speculate=False)
    seconds = {"drafted": round(middle - begin, 2), "plain": round(perf_counter() - middle, 2)}
    found = {i: faults(form, d, p) for i, (form, d, p) in enumerate(zip(forms, drafted, plain, strict=True))}
    total = Statistics.merge(each.statistics for each in drafted)
    return {
        "schemas": len(forms),
        "tokens": total.num_generation_tokens,
        "seconds": seconds,
        "mean_acceptance_length": round(total.mean_acceptance_length, 3),
        "faults": {i: fault for i, fault in found.items() if fault},
    }


def speed(llm: LLM, forms: list[dict[str, Any]], prompt: str, max_tokens: int) -> dict[str, float]:
    """Tokens per second after the first token, over the best of three turns of each method on each schema."""
    methods = [(with_schema, draft) for with_schema in (True, False) for draft in (False, True)]
    seconds, tokens = dict.fromkeys(methods, 0.0), 0
    for i, form in enumerate(forms):
        params = replace(parameters(i, form, max_tokens), temperature=0.0)
        count = len(llm.generate(prompt, params).token_ids)
        free = SamplingParams(max_tokens=count, ignore_eos=True)
        best = dict.fromkeys(methods, float("inf"))
        for _ in range(3):
            for with_schema, draft in methods:
                begin = perf_counter()
                done = llm.generate(prompt, params if with_schema else free, speculate=draft)
                taken = perf_counter() - begin - done.statistics.time_to_first_token
                best[with_schema, draft] = min(best[with_schema, draft], taken)
        tokens += count - 1
        for method in methods:
            seconds[method] += best[method]
    names = {
        (w, d): f"{'schema' if w else 'free'}_{'drafted' if d else 'plain'}"
        for w in (True, False)
        for d in (True, False)
    }
    return {names[method]: round(tokens / seconds[method], 1) for method in methods}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--timed", type=int, default=20, help="schemas whose speed is measured (default: 20)")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--prompt", default="Write a JSON document.\n")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    forms = schemas(max(args.schemas, args.timed), args.seed)
    with LLM(args.bundle, max_batch_size=args.batch, threads=args.threads) as llm:
        result = conform(llm, forms[: args.schemas], args.prompt, args.max_tokens) if args.schemas else {}
        for number, fault in result.get("faults", {}).items():
            print(f"schema {number}: {fault}\n{json.dumps(forms[number])}")
        if args.timed:
            result["tokens_per_second"] = speed(llm, forms[: args.timed], args.prompt, args.max_tokens)
    result |= {"bundle": args.bundle.name, "llguidance": version("llguidance"), "processor": processor()}
    print(json.dumps(result))
    return 1 if result.get("faults") else 0


if __name__ == "__main__":
    raise SystemExit(main())
