"""`quantization_config` of compressed-tensors, which LLM Compressor writes.

Groups of layers have arguments for their weights and inputs. A layer's group is decided by its name first, then by
regular expressions, both in the order of their characters, then by the class of its module. Source: the package
compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.rules import (
    NAMES,
    Quantization,
    Rule,
    check_count,
    optional_names,
    regex,
    text_name,
)
from dflash_trt.errors import show
from dflash_trt.formats import Algorithm
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.floats import NVFP4_BLOCK

_GROUPS = 1024
_LINEAR = ("Linear", "LinearBase")  # classes of modules that are linear layers here
_HOW = "fetch the original checkpoint and quantize it with: dflash-trt quantize"
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")


class _Numbers(NamedTuple):
    """The numbers of weights: what their arguments say, which formats hold them, and how inputs may be rounded.

    formats: the first one is meant where a file does not say. With rounded inputs, that of INT8 is "int-quantized".
    inputs: `dynamic` of rounded inputs (False where their scale is in the file) -> the strategies that are read.
    input_bits: None: any, because inputs are not rounded here.
    """

    type: str
    bits: int
    strategies: tuple[str, ...]
    group_size: int | None
    formats: tuple[str, ...]
    inputs: Mapping[bool | str, tuple[str, ...]]
    input_bits: int | None

    @property
    def integer(self) -> bool:
        """Whether these are integers, which may have zero points, and whose inputs a CPU rounds in any case."""
        return self.type == "int"


_ROWS, _TENSOR = ("token", "tensor", "group"), ("tensor_group",)
_FP8_ROWS = ("tensor", "channel", "block", "group")
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_INT8_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
_NUMBERS = {
    "mxfp8": _Numbers("float", 8, ("group",), BLOCK, ("mxfp8-quantized",), {True: ("group",)}, None),
    "fp8": _Numbers("float", 8, _FP8_ROWS, None, _FP8_FORMATS, {True: _ROWS, False: ("tensor",)}, 8),
    "nvfp4": _Numbers(
        *("float", 4, _TENSOR, NVFP4_BLOCK, ("nvfp4-pack-quantized",)),
        inputs=dict.fromkeys((True, False, "local"), (*_TENSOR, "group")),
        input_bits=4,
    ),
    "mxfp4": _Numbers("float", 4, ("group",), BLOCK, ("mxfp4-pack-quantized",), {True: ("group",)}, None),
    "int8": _Numbers("int", 8, ("channel", "group"), None, _INT8_FORMATS, {True: _ROWS}, 8),
    "int4": _Numbers("int", 4, ("channel", "group"), None, ("pack-quantized",), {True: _ROWS}, 8),
}
_FORMATS = tuple(dict.fromkeys(name for numbers in _NUMBERS.values() for name in numbers.formats))


def read_compressed_tensors(fields: Fields) -> Quantization:
    """Raises CheckpointError, naming the field, for whatever would change the numbers and is not read."""
    for key in ("transform_config", "moe_sparsity_config"):
        if fields.get(key):
            raise fields.wrong(key, f"which is not supported; {_HOW}")
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise sparsity.error(
            "format", f"is {show(sparsity.get('format'))}: sparse weights are not supported; {_HOW}"
        )
    groups = fields.needed("config_groups", "an object")
    if len(groups.values) > _GROUPS:
        raise fields.error("config_groups", f"has {len(groups.values)} groups, expected at most {_GROUPS}")
    targets: dict[str, tuple[Algorithm | None, str]] = {}  # the algorithm, and the group that says so
    for name in groups.values:
        names, algorithm = _group(fields, groups, name)
        for target in names:
            before, group = targets.get(target, (algorithm, name))
            if before != algorithm:
                raise groups.error(
                    name, f"has the target {show(target)}, but so has {show(group)}, with other weights"
                )
            targets[target] = algorithm, name
    cache = fields.section("kv_cache_scheme")
    if cache is not None and cache.integer("num_bits", default=8) != 8:
        raise cache.wrong("num_bits", "expected 8")
    return _ruled(
        fields, {target: algorithm for target, (algorithm, _) in targets.items()}, cache is not None
    )


def _ruled(fields: Fields, targets: dict[str, Algorithm | None], kv_cache: bool) -> Quantization:
    ignore = optional_names(fields, "ignore")
    patterns = tuple(dict.fromkeys(text for text in ignore if text.startswith("re:")))
    check_count(fields, "ignore", patterns)
    rules = [Rule(regex(fields, "ignore", text)) for text in patterns]
    ignored = tuple(rule.pattern for rule in rules)
    layers: dict[str, Algorithm | None] = {
        text_name(name): None if any(pattern.match(name) for pattern in ignored) else algorithm
        for name, algorithm in targets.items()
        if not name.startswith("re:") and name not in _LINEAR
    }
    layers.update(dict.fromkeys(text_name(name) for name in ignore if not name.startswith("re:")))
    ordered = sorted(name for name in targets if name.startswith("re:"))
    check_count(fields, "config_groups", ordered)
    rules += [Rule(regex(fields, "config_groups", text), targets[text]) for text in ordered]
    default = next((targets[name] for name in _LINEAR if name in targets), None)
    if set(_LINEAR) & set(ignore):
        return Quantization(fields.path, kv_cache=kv_cache)
    return Quantization(fields.path, default, layers, tuple(rules), kv_cache=kv_cache)


def _group(fields: Fields, groups: Fields, name: str) -> tuple[tuple[str, ...], Algorithm | None]:
    """The targets of a group, and the algorithm of their layers; None: they are not quantized."""
    group = groups.needed(name, "an object")
    names = group.strings("targets", most=NAMES)
    if embeddings := [text for text in names if "Embedding" in text]:
        raise group.error(
            "targets", f"has {show(embeddings[0])}: quantized embeddings are not supported; {_HOW}"
        )
    weights, inputs = group.section("weights"), group.section("input_activations")
    if group.get("output_activations") is not None:
        raise group.error("output_activations", f"are to be rounded, which is not supported; {_HOW}")
    if weights is None:
        if inputs is not None:
            raise group.error("weights", f"are missing, but inputs are to be rounded; {_HOW}")
        return names, None
    return names, _algorithm(fields, group, weights, inputs)


def _algorithm(fields: Fields, group: Fields, weights: Fields, inputs: Fields | None) -> Algorithm:
    strategy, size = _strategy(weights), weights.get("group_size")
    if weights.get("dynamic"):
        raise weights.wrong("dynamic", "expected false")
    symmetric = weights.boolean("symmetric", default=True)
    name = _numbers(weights, strategy)
    label, rows = name.upper(), 1
    if _NUMBERS[name].integer:
        label = f"W{_NUMBERS[name].bits}A{16 if inputs is None else 8}{'' if symmetric else '_ASYM'}"
    elif not symmetric:
        raise weights.error("symmetric", f"is false, but {label} has no zero points")
    columns = size if strategy in ("group", "tensor_group") else 0
    if strategy == "block":
        rows, columns = _block(weights)
    packed = _stored(fields, group, name, inputs) in _PACKED
    if not symmetric and not packed:
        raise weights.error("symmetric", f"is false, which is supported for 'pack-quantized' only; {_HOW}")
    activations, static = (False, False) if inputs is None else _inputs(name, inputs)
    return Algorithm(
        label,
        "fp8" if name == "mxfp8" else name,
        activations=activations,
        static=static,
        group_size=columns,
        group_rows=rows,
        zero_points=not symmetric,
        ordered=weights.get("actorder") in ("group", "dynamic", True),
        reciprocal=name == "nvfp4",
        layout="packed" if packed else "plain",
    )


def _strategy(fields: Fields) -> str:
    """How many numbers share a scale; where the file does not say, its group size does."""
    size = fields.get("group_size")
    if size is not None and (type(size) is not int or not (size == -1 or 1 <= size <= 1 << 20)):
        raise fields.wrong("group_size", "expected -1 or an integer above 0")
    if fields.get("strategy") is not None:
        strategy = fields.string("strategy").lower()
    else:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("group", "tensor_group") and (size is None or size < 1):
        raise fields.wrong("group_size", f"but strategy is {strategy!r}")
    return strategy


def _block(weights: Fields) -> tuple[int, int]:
    block = weights.get("block_structure")
    if isinstance(block, str):  # as early files have it
        parts = block.split("x")
        block = [int(part) if part.isdecimal() and len(part) < 8 else part for part in parts]
    named_sizes = Fields(weights.path, {"block_structure": block}, weights.prefix)
    sizes = named_sizes.integers("block_structure", minimum=1, maximum=1 << 12, most=2)
    if len(sizes) != 2:
        raise weights.error("block_structure", f"is {show(block)}, expected rows and columns")
    return sizes[0], sizes[1]


def _numbers(weights: Fields, strategy: str) -> str:
    """The key in _NUMBERS."""
    bits, size = weights.integer("num_bits", default=8), weights.get("group_size")
    kind = weights.get("type") or "int"
    for name, row in _NUMBERS.items():
        if (kind, bits) != (row.type, row.bits) or strategy not in row.strategies:
            continue
        if name == "mxfp8" and "uint8" not in str(weights.get("scale_dtype")):
            continue
        if row.integer and strategy == "group" and size % BLOCK:
            raise weights.error("group_size", f"is {size}, expected a multiple of {BLOCK}")
        if row.group_size in (None, size):
            return name
    of = "" if size is None else f" of {size}"
    raise weights.error(
        "num_bits",
        f"is {bits}: weights of the type {show(kind)} with the strategy {strategy!r}{of} are not supported; {_HOW}",
    )


def _stored(fields: Fields, group: Fields, name: str, inputs: Fields | None) -> str:
    """The format of a group, which may be the whole file's. `inputs` decides where neither says."""
    where = group if group.get("format") is not None else fields
    stored, formats = where.get("format"), _NUMBERS[name].formats
    if stored in (None, "mixed-precision", "fakequant"):
        return "int-quantized" if name == "int8" and inputs is not None else formats[0]
    if not isinstance(stored, str) or stored not in _FORMATS:
        raise where.wrong("format", f"supported are: {', '.join(_FORMATS)}; {_HOW}")
    if stored not in formats:
        raise where.wrong("format", f"but the weights of {group.prefix.rstrip('.')} are {name}")
    return stored


def _inputs(name: str, inputs: Fields) -> tuple[bool, bool]:
    """Whether inputs are rounded to the numbers of the weight, and whether their scale is in the file.

    Inputs of integer weights are rounded to eight bits on a CPU, whether or not the file asks for it.
    """
    row, bits, kind = _NUMBERS[name], inputs.integer("num_bits", default=8), inputs.get("type") or "int"
    strategy, dynamic = _strategy(inputs), inputs.get("dynamic")
    if dynamic not in (None, True, False, "local"):
        raise inputs.wrong("dynamic", "expected true, false or 'local'")
    fits = kind == row.type and row.input_bits in (None, bits)
    fits = fits and strategy in row.inputs.get(dynamic or False, ())
    fits = fits and (name != "nvfp4" or inputs.get("group_size") in (None, NVFP4_BLOCK))
    if not fits or not (row.integer or inputs.boolean("symmetric", default=True)):
        raise inputs.error(
            "num_bits",
            f"is {bits}: inputs of the type {show(kind)} with the strategy {strategy!r}"
            f"{'' if dynamic else ', static'} are not supported for {name} weights; {_HOW}",
        )
    rounded = name == "nvfp4" or (name == "fp8" and strategy != "group")
    return rounded, rounded and dynamic is not True
