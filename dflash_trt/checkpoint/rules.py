"""Which layers of a checkpoint are quantized, and how: the rules that a configuration gives, in one form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.errors import show
from dflash_trt.formats import Algorithm

# Limits: module names, patterns among them, characters of a pattern and of a name that one is tried on. Every name and
# pattern costs a search.
NAMES, _PATTERNS, _CHARACTERS, _NAME_CHARACTERS = 1 << 18, 1024, 4096, 256
CACHE_SCALES = (".k_scale", ".v_scale")  # the ends of names of tensors for a quantized cache
_REPEATS = 5  # of a regular expression, each of which may multiply the time of a search by a name's length
_PATTERN_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Rule:
    """Layers whose names `pattern` matches from their beginning have `algorithm`; None: they are not quantized."""

    pattern: re.Pattern[str]
    algorithm: Algorithm | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """By `path`, linear layers are stored as `layers` names them, else as the first rule says, else in `default`.

    kv_cache: whether there are scales for a quantized cache.
    method: the `quant_method`; "modelopt" for hf_quant_config.json.
    """

    path: Path
    default: Algorithm | None = None
    layers: Mapping[str, Algorithm | None] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    kv_cache: bool = False
    method: str = "modelopt"

    @property
    def algorithms(self) -> set[Algorithm]:
        named = {self.default, *self.layers.values(), *(rule.algorithm for rule in self.rules)}
        return {algorithm for algorithm in named if algorithm is not None}

    @property
    def name(self) -> str | None:
        """The algorithms, as messages name them; None if nothing is quantized."""
        return ", ".join(sorted({a.name for a in self.algorithms})) or None

    @property
    def cache(self) -> str | None:
        """What is done with scales of a quantized cache, as `inspect` shows it; None if there are none."""
        return "8 bits on TensorRT-LLM; elsewhere its scales are unused" if self.kv_cache else None

    def algorithm(self, layer: str) -> Algorithm | None:
        """The algorithm of a linear layer. `layer` is the name of its tensors without `.weight`."""
        if layer in self.layers:
            return self.layers[layer]
        names = _file_names(layer)
        for rule in self.rules if len(layer) <= _NAME_CHARACTERS else ():
            if any(rule.pattern.match(name) for name in names):
                return rule.algorithm
        return self.default


def text_name(name: str) -> str:
    """The name of a tensor or layer in the model tree. Files of early models with images have another for the text."""
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
        return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
    return name


def _file_names(layer: str) -> tuple[str, ...]:
    """The names that a layer may have in a file's rules: its own, and that of `text_name`'s early files."""
    if layer.startswith("model.language_model."):
        return layer, f"language_model.model.{layer.removeprefix('model.language_model.')}"
    return (layer, f"language_model.{layer}") if layer == "lm_head" else (layer,)


def optional_names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names of modules; none where the field is absent."""
    return fields.strings(key, most=NAMES) if fields.get(key) is not None else ()


def named(fields: Fields, key: str) -> tuple[Rule, ...]:
    """Layers that are not quantized: those with one of the names in a field as a part of their own, between dots."""
    skipped = optional_names(fields, key)
    check_count(fields, key, skipped)
    parts = (text_name(name.strip(".")) for name in skipped)
    return tuple(Rule(re.compile(rf"(?:.*\.)?{re.escape(part)}(?:\.|$)")) for part in parts if part)


def globs(fields: Fields, key: str, patterns: Sequence[str]) -> tuple[Rule, ...]:
    """Layers that are not quantized, by the patterns of `fnmatch`: *, ? and [...]."""
    check_count(fields, key, patterns)
    for pattern in patterns:
        if len(pattern) > _PATTERN_CHARACTERS:
            raise fields.error(
                key, f"has {show(pattern)}, expected patterns of at most {_PATTERN_CHARACTERS} characters"
            )
    return tuple(Rule(re.compile(translate(pattern))) for pattern in patterns)


def check_count(fields: Fields, key: str, patterns: Sized) -> None:
    """Refuse more patterns than a search of every name may take."""
    if len(patterns) > _PATTERNS:
        raise fields.error(key, f"has {len(patterns)} patterns, expected at most {_PATTERNS}")


def regex(fields: Fields, key: str, text: str) -> re.Pattern[str]:
    """A regular expression of a file, refused where a search could take very long: it may not repeat a group.

    compressed-tensors marks one with "re:", which is no part of it.
    """
    text = text.removeprefix("re:")
    if len(text) > _CHARACTERS:
        raise fields.error(key, f"has {len(text)} characters, expected at most {_CHARACTERS}")
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.error(key, f"is {show(text)}, which is no regular expression ({error})") from None
    plain = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", text, flags=re.DOTALL)
    repeats = len(re.findall(r"[*+{]", plain))
    if repeats > _REPEATS or re.search(r"\)[*+{]", plain):
        raise fields.error(
            key,
            f"is {show(text)}, which could take very long to match: expected at most {_REPEATS} repetitions, of single "
            "characters or classes of them",
        )
    return pattern
