"""Almost valid inputs: valid ones, changed where readers look."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any

WORDS = (
    *("default", "linear", "llama3", "yarn", "full_attention", "sliding_attention", "silu", "mxfp4"),
    *("modelopt", "FP8", "NVFP4", "W4A16_AWQ", "MIXED_PRECISION", "F4", "BF16", "U8", "auto"),
    *("Qwen3ForCausalLM", "DFlashDraftModel", "manifest.json", "lm_head", "model.layers.*", "*a*a*a*b"),
    *("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Replace", "Split", "Strip"),
    *("Precompiled", "Fuse", "[[[[", "../../etc/passwd", "/dev/zero"),
)
# Small values, then such as are made anew each time.
_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 64, 65537, 2**29, 2**31 - 1),
    *(2**31, 2**63 - 1, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308),
    *(float("nan"), float("inf"), "", "a", "\x00\x1b[2J\n", "\ud800", "é😀"),
    *([], {}, [[]], {"a": {}}, [None], [0, 0], {"": 0}),
)
HOSTILE: tuple[Callable[[], Any], ...] = (
    *(partial(deepcopy, value) for value in _VALUES), lambda: "x" * 100_000, lambda: "[" * 50_000,
    lambda: list(range(20_000)), lambda: ["full_attention"] * 20_000, lambda: {str(i): i for i in range(5_000)},
    lambda: _nested(80),
)  # fmt: skip
_LARGE = 200_000  # larger inputs are not enlarged further


def mutate_json(random: Random, text: bytes) -> bytes:
    """Some changes to the values of a document, and sometimes to its bytes."""
    document = json.loads(text)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 8))):
        document = _change(random, document)
    found = json.dumps(document).encode()
    if random.random() < 0.1:  # a duplicate key
        found = found.replace(b"{", b'{"twice": 0, "twice": 1, ', 1).replace(b", }", b"}")
    if random.random() < 0.05:  # a number that is not JSON
        found = found.replace(b"1", random.choice((b"1e999", b"1" + b"0" * 5000, b"-Infinity")), 1)
    return mutate_bytes(random, found) if random.random() < 0.15 else found


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Some bytes flipped, removed, repeated or inserted."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        kind = random.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del changed[at : at + random.choice((1, 2, 100))]
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = random.choice(
                (b"\xff", b"\x00", b"\xef\xbb\xbf", b"[" * 3000, b'"', b"{{", b"%}")
            )
        elif len(changed) < _LARGE:
            changed[at:at] = changed[max(0, at - random.choice((4, 400))) : at]
    return bytes(changed)


def mutate_safetensors(random: Random, data: bytes) -> bytes:
    """The header changed as JSON, mostly with its correct length."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if random.random() < 0.2:
        return mutate_bytes(random, data)
    header = mutate_json(random, header)
    length = len(header) if random.random() < 0.9 else random.choice((0, len(header) - 1, 2**63, 2**31))
    return max(0, length).to_bytes(8, "little") + header + body


def mutate_text(random: Random, text: bytes) -> bytes:
    """A template with statements inserted at the ends of its lines."""
    lines = text.decode().split("\n")
    for _ in range(random.choice((1, 2, 3))):
        lines.insert(random.randrange(len(lines) + 1), random.choice(_STATEMENTS))
    changed = "\n".join(lines).encode()
    return mutate_bytes(random, changed) if random.random() < 0.3 else changed


_STATEMENTS = (
    "{{ messages }}", "{{ messages[0].content * 10 ** 9 }}", "{{ 'a'.ljust(10 ** 10) }}",
    "{{ '%999999999d' | format(1) }}", "{{ ''.__class__ }}", "{{ x.y.z }}", "{{ [1] * 10 ** 10 }}",
    "{% for i in range(99999) %}{{ i }}{% endfor %}",
    "{% set ns = namespace(a='a') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}", "{% include 'other' %}", "{% extends 'other' %}",
    "{{ raise_exception('\x1b[2J') }}", "{{ raise_exception(messages) }}", "{{ strftime_now('%Y' * 1000) }}",
    "{{ messages | tojson(indent=10 ** 9) }}", "{{ 1 / 0 }}", "{% if", "{% generation %}", "{{ lipsum(n=10 ** 6) }}",
    "{{ 10 ** (10 ** 7) }}",
)  # fmt: skip


def _change(random: Random, document: Any) -> Any:
    """One change, somewhere in the document."""
    if not isinstance(document, dict | list):
        return document
    places: list[tuple[Any, Any]] = []
    level = [document]
    while level:  # the places to change; of a large list, only some
        parents, level = level, []
        for parent in parents:
            children = parent.items() if isinstance(parent, dict) else list(enumerate(parent))[:200]
            for key, child in children:
                places.append((parent, key))
                if isinstance(child, dict | list):
                    level.append(child)
    kind = random.randrange(10)
    if not places or (kind == 0 and random.random() < 0.1):
        return random.choice(HOSTILE)() if random.random() < 0.3 else {"a": document}
    parent, key = random.choice(places)
    if kind < 5:
        parent[key] = random.choice(HOSTILE)() if random.random() < 0.7 else random.choice(WORDS)
    elif kind == 5:
        del parent[key]
    elif kind == 6:
        parent[key] = random.choice(places)[0]
        if _loops(document):
            parent[key] = None
    elif kind == 7 and isinstance(parent, dict):
        parent[random.choice((random.choice(WORDS), f"{key}.", "\x1b]0;x\x07", "head_dim", "_scale"))] = (
            parent[key]
        )
    elif kind == 8 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] = random.choice(
            (parent[key] + 1, parent[key] - 1, -parent[key], parent[key] * 2, str(parent[key]))
        )
    elif isinstance(parent, list) and len(parent) < 1000:
        parent[:] = parent * random.choice((2, 3, 20))
    return document


def _loops(document: Any) -> bool:
    try:
        return len(json.dumps(document)) > 100 * _LARGE
    except (ValueError, RecursionError):
        return True


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value
