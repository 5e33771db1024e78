"""Rotary position embeddings: the configuration and the frequencies computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.errors import show

_SCALING_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    ),
    "proportional": ("factor", "partial_rotary_factor"),
}

# Fields that may be as small as this; others are greater than 0.
_LEAST = {"factor": 1, "partial_rotary_factor": 0, "mscale": 0, "mscale_all_dim": 0}
_YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`parameters` holds the checkpoint's scaling values under their names in Transformers.

    partial: the share of a head that is rotated, from its first number on.
    growth: how fast queries grow with their position p: they are multiplied by 1 + growth * ln(1 + floor(p / L)), L
        the length before scaling. 0: not at all.
    """

    rope_type: str
    theta: float
    parameters: Mapping[str, float | int | bool] = field(hash=False)
    partial: float = 1.0
    growth: float = 0.0


# They give frequencies to the height and the width of an image. In a text, all positions of a token are the same.
_IMAGES = ("mrope_section", "mrope_interleaved")
_GROWTH = "llama_4_scaling_beta"


def read_rope(
    fields: Fields,
    *,
    partial: float = 1.0,
    images: bool = False,
    theta: float | None = None,
    growing: bool = False,
) -> RopeConfig:
    """Read `rope_parameters` (Transformers 5), or `rope_theta` and `rope_scaling` (earlier versions).

    Both may be present if they agree. `theta` is the default of a file without `rope_theta`; None: it must be there.
    `partial` is the family's default of the share that is rotated; with 1, no other share is read. `images`: whether
    there may be fields for images. `growing`: whether queries grow with their position (`RopeConfig.growth`).

    Raises:
        CheckpointError: an unknown type, a field that does not belong to the type, a value out of range, or two places
            that disagree.
    """
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    also = _IMAGES if images else (_GROWTH, "max_position_embeddings") if growing else ()
    sections = [section for section in (new, old) if section and section.values]
    ropes = [_read_scaling(section, fields, partial, also, theta) for section in sections]
    if growing and sections:
        ropes = [
            replace(rope, growth=_growth(section, fields, rope))
            for section, rope in zip(sections, ropes, strict=True)
        ]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise fields.error("rope_parameters", f"is {ropes[0]}, but rope_scaling is {ropes[1]}")
    if ropes:
        return ropes[0]
    if growing:
        raise fields.error("rope_parameters", f"is missing, expected an object with {_GROWTH}")
    given_theta = fields.number("rope_theta", above=1, default=theta)
    return RopeConfig("default", given_theta, {}, _partial(fields, None, partial))


def read_rope_of(layers: str, fields: Fields, theta: float) -> RopeConfig:
    """The RoPE of one kind of layers, of a model that has one for each kind in `rope_parameters`."""
    section = fields.needed("rope_parameters", "an object").needed(layers, "an object with rope_theta")
    return _read_scaling(section, Fields(fields.path, {}, fields.prefix), 1.0, (), theta)


def _growth(section: Fields, top: Fields, rope: RopeConfig) -> float:
    length = section.get("max_position_embeddings")
    if length is not None and length != top.get("max_position_embeddings"):
        raise section.wrong(
            "max_position_embeddings",
            f"but the model's is {top.get('max_position_embeddings')}",
        )
    if "original_max_position_embeddings" not in rope.parameters:
        raise section.error("original_max_position_embeddings", f"is missing, but {_GROWTH} counts in it")
    return section.number(_GROWTH, minimum=0)


def _partial(top: Fields, section: Fields | None, default: float) -> float:
    """The share of a head that is rotated. Both places of the field must agree."""

    def share(place: Fields, key: str) -> float:
        value = place.number(key)
        if value > 1 or (default == 1 and value != 1):
            raise place.error(key, f"is {value:g}, only {'up to ' if default != 1 else ''}1 is supported")
        return value

    places = [(place, "partial_rotary_factor") for place in (top, section) if place is not None]
    value = stated(places, share)
    return default if value is None else value


def _read_scaling(
    section: Fields, top: Fields, partial: float, images: tuple[str, ...], default: float | None
) -> RopeConfig:
    if any(isinstance(value, dict) for value in section.values.values()):
        raise top.error(
            section.prefix.rstrip("."), f"is {show(dict(section.values))}, expected one RoPE for all layers"
        )
    names = [(section, key) for key in ("rope_type", "type")]
    rope_type = stated(names, lambda place, key: place.string(key, among=_SCALING_FIELDS)) or "default"
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SCALING_FIELDS[rope_type], *images}
    for key, value in section.values.items():
        if key not in known and value is not None:
            raise section.wrong(key, f"but RoPE of type {rope_type!r} has no such field")
    places = [(place, "rope_theta") for place in (top, section)]
    theta = stated(places, lambda place, key: place.number(key, above=1))
    if theta is None:
        theta = top.number("rope_theta", default=default)
    values = _read_values(section, rope_type, top)
    share = 1.0 if rope_type == "proportional" else _partial(top, section, partial)
    return RopeConfig(rope_type, theta, values, share)


def _read_values(section: Fields, rope_type: str, top: Fields) -> dict[str, float | int | bool]:
    values: dict[str, float | int | bool] = {}
    for key in _SCALING_FIELDS[rope_type]:
        if key == "original_max_position_embeddings":
            length = stated([(section, key), (top, key)], Fields.integer)
            values |= {} if length is None else {key: length}
            continue
        needed = () if rope_type == "proportional" else ("factor", "low_freq_factor", "high_freq_factor")
        if section.get(key) is None and key not in needed:
            continue
        if key == "truncate":
            values[key] = section.boolean(key)
        else:
            values[key] = section.number(key, minimum=_LEAST.get(key))
        if key == "partial_rotary_factor" and values[key] > 1:
            raise section.error(key, f"is {values[key]:g}, expected a share of a head, up to 1")
    for small, large in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        low, high = (values.get(key, _YARN_DEFAULTS.get(key, 0)) for key in (small, large))
        if large in _SCALING_FIELDS[rope_type] and high <= low:
            raise section.error(large, f"is {high:g}, but {small} is {low:g}: the first must be the greater")
    return values


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int
) -> tuple[NDArray[np.float32], float]:
    """Inverse frequencies and the factor on cos and sin, computed as in Transformers' ROPE_INIT_FUNCTIONS.

    Returns float32 `[head_dim / 2]` and the attention factor (1.0 for all but yarn). `max_position_embeddings`
    replaces a missing `original_max_position_embeddings`, as in Transformers.
    Sources: linear and proportional, Transformers; llama3, Llama 3.1 release; yarn, Peng et al. 2023 (arXiv
    2309.00071).
    """
    # One rounding of the float64 power is closer to torch's float32 power than NumPy's float32 power is.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    base = np.float32(1) / wavelengths
    values = rope.parameters
    original = int(values.get("original_max_position_embeddings", max_position_embeddings))
    if rope.rope_type == "default":
        return base, 1.0
    if rope.rope_type == "linear":
        return base / np.float32(values["factor"]), 1.0
    if rope.rope_type == "proportional":
        # A share of the pairs rotates, with the frequencies of the whole head. The others stay as they are.
        rotated = int(values.get("partial_rotary_factor", 1.0) * head_dim // 2)
        base[rotated:] = 0
        return base / np.float32(values.get("factor", 1.0)), 1.0
    if rope.rope_type == "llama3":
        return _llama3(base, values, original), 1.0
    return _yarn(wavelengths, rope, head_dim, original)


def _llama3(
    base: NDArray[np.float32], values: Mapping[str, float | int | bool], original: int
) -> NDArray[np.float32]:
    factor, low, high = values["factor"], values["low_freq_factor"], values["high_freq_factor"]
    wavelen = np.float32(2 * math.pi) / base
    smooth = (np.float32(original) / wavelen - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - smooth) * base / np.float32(factor) + smooth * base
    scaled = np.where(wavelen > original / low, base / np.float32(factor), between)
    result: NDArray[np.float32] = np.where(wavelen < original / high, base, scaled)
    return result


def _yarn(
    wavelengths: NDArray[np.float32], rope: RopeConfig, head_dim: int, original: int
) -> tuple[NDArray[np.float32], float]:
    values, factor = rope.parameters, rope.parameters["factor"]

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    attention_factor = values.get("attention_factor")
    if attention_factor is None:
        top, bottom = values.get("mscale", 0), values.get("mscale_all_dim", 0)
        attention_factor = magnitude(top) / magnitude(bottom) if top and bottom else magnitude(1)
    low, high = (dimension(values.get(key, _YARN_DEFAULTS[key])) for key in ("beta_fast", "beta_slow"))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    index = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    keep = np.float32(1) - ramp
    interpolated = np.float32(1) / (np.float32(factor) * wavelengths)
    return interpolated * (np.float32(1) - keep) + np.float32(1) / wavelengths * keep, float(attention_factor)
