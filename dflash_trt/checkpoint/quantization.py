"""The quantization of a checkpoint, from the section of its configuration that says which layers are stored how.

`hf_quant_config.json`, as NVIDIA's Model Optimizer writes it, takes precedence over config.json's
`quantization_config`, whose `quant_method` says what the other fields mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dflash_trt.checkpoint.compressed_tensors import read_compressed_tensors
from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.layouts import GGUF
from dflash_trt.checkpoint.rules import (
    Quantization,
    Rule,
    check_count,
    globs,
    named,
    optional_names,
    regex,
    text_name,
)
from dflash_trt.errors import show
from dflash_trt.formats import ALGORITHMS, FORMATS, Algorithm
from dflash_trt.formats.base import BLOCK, FileLayout

QUANT_CONFIG = "hf_quant_config.json"
SECTIONS = ("quantization_config", "compression_config")  # of config.json; the second in early files
# Methods that are not read -> how people call them.
_OTHERS = {
    "auto-round": "AutoRound's own format, unlike its exports as auto_gptq and auto_awq,",
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "quark": "Quark",
    "torchao": "torchao",
}
_LARGEST_BLOCK = 1 << 12  # rows or columns
_HOW = "fetch another quantization of the model, or quantize the original with: dflash-trt quantize"
_HEAD = "lm_head"
# checkpoint_format -> layout; v1 stores every zero point less one.
_GPTQ: Mapping[object, FileLayout] = {None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}


def read_quantization(directory: Path) -> Quantization:
    """Read the quantization of the checkpoint in `directory`. Files that do not mention it mean: nothing is
    quantized.

    The family handles experts in OpenAI's MXFP4 (quant_method "mxfp4").

    Raises:
        CheckpointError: naming the file and field, if the field is malformed or names a format that is not supported.
    """
    path = directory / QUANT_CONFIG
    if path.is_file():
        whole = Fields.read(path)
        if whole.get("quantization") is None and "quant_algo" in whole.values:  # as config.json has them
            return _read_modelopt(whole)
        inner = whole.needed("quantization", "an object with quant_algo")
        return _read_modelopt(inner, "exclude_modules", "kv_cache_quant_algo")
    path = directory / "config.json"
    section = _section(Fields.read(path)) if path.is_file() else None
    if section is None:
        return Quantization(path)
    method = section.get("quant_method")
    if method is None and section.get("config_groups") is not None:
        method = "compressed-tensors"
    if method in (None, "mxfp4"):  # without a method, weights are floats that a training rounded
        return Quantization(path)
    if method == "modelopt_mixed":  # some files with MIXED_PRECISION have this
        method = "modelopt"
    if not isinstance(method, str) or method not in _READERS:
        raise section.error(
            "quant_method",
            f"is {show(method)}: {_OTHERS.get(str(method), 'this quantization')} is not supported, only "
            f"{', '.join(repr(name) for name in _READERS)}; make such a checkpoint from the original, unquantized "
            "model with: dflash-trt quantize",
        )
    return replace(_READERS[method](section), method=method)


def _section(whole: Fields) -> Fields | None:
    for key in SECTIONS:
        section = whole.section(key)
        if section is None:
            continue
        inner = section.section("quantization_config")
        if inner is None:
            return section
        sparsity = section.get("sparsity_config")
        return Fields(whole.path, {"sparsity_config": sparsity, **inner.values}, inner.prefix)
    return None


def _read_modelopt(
    fields: Fields, excluded: str = "ignore", kv_cache: str = "kv_cache_scheme"
) -> Quantization:
    layers: dict[str, Algorithm | None] = {}
    default = None
    names = tuple(map(text_name, optional_names(fields, excluded)))
    patterns = tuple(dict.fromkeys(name for name in names if set(name) & set("*?[")))
    layers.update(dict.fromkeys(set(names) - set(patterns)))
    if fields.get("quant_algo") == "MIXED_PRECISION":
        algorithms = fields.needed("quantized_layers", "an object, because quant_algo is MIXED_PRECISION")
        for name in algorithms.values:
            layer = algorithms.section(name)
            if layer is not None:
                layers[text_name(name)] = _algorithm(layer, layer)
    elif fields.get("quant_algo") is not None:
        # config.json gives the group size with the weights of the only group of layers.
        groups = fields.section("config_groups")
        group = groups.section("group_0") if groups is not None else None
        weights = group.section("weights") if group is not None else None
        default = _algorithm(fields, fields if fields.get("group_size") or weights is None else weights)
    cache = fields.get(kv_cache)
    if cache not in (None, "FP8") and not (isinstance(cache, dict) and cache.get("num_bits") == 8):
        raise fields.wrong(kv_cache, "supported is FP8")
    return Quantization(
        fields.path, default, layers, globs(fields, excluded, patterns), kv_cache=cache is not None
    )


def _algorithm(fields: Fields, grouped: Fields) -> Algorithm:
    name = fields.string("quant_algo")
    algorithm = ALGORITHMS.get(name.upper())
    if algorithm is None:
        raise fields.wrong("quant_algo", f"supported are: {', '.join(ALGORITHMS)}")
    size = grouped.get("group_size")
    if not size:  # null, or 0 without groups
        return algorithm
    allowed = FORMATS[algorithm.scheme].group_sizes or (algorithm.group_size,)
    if size not in allowed or type(size) is not int:
        expected = " or ".join(map(str, allowed))
        raise grouped.wrong("group_size", f"but {algorithm.name} is read with {expected}")
    return replace(algorithm, group_size=size)


def _read_fp8(fields: Fields) -> Quantization:
    """Layers in FP8 as Transformers has them: with a scale for each block, or for the whole weight."""
    if fields.get("fmt") not in (None, "e4m3"):
        raise fields.wrong("fmt", "expected 'e4m3'")
    if fields.get("expert_dtype") not in (None, "fp8"):
        raise fields.wrong("expert_dtype", "expected 'fp8'")
    old = fields.get("modules_to_not_convert") is None
    skipped = named(fields, "ignored_layers" if old else "modules_to_not_convert")
    return Quantization(fields.path, _fp8_algorithm(fields), rules=skipped)


def _fp8_algorithm(fields: Fields) -> Algorithm:
    mx = fields.get("quant_method") == "mxfp8"
    if mx or fields.get("weight_block_size") is not None:
        sizes: tuple[int, ...] = (1, BLOCK)
        if fields.get("weight_block_size") is not None:
            sizes = fields.integers("weight_block_size", minimum=1, maximum=_LARGEST_BLOCK, most=2)
        if len(sizes) != 2 or (mx and sizes != (1, BLOCK)):
            expected = f"{[1, BLOCK]}" if mx else "rows and columns"
            raise fields.error("weight_block_size", f"is {show(list(sizes))}, expected {expected}")
        name = "MXFP8" if mx else "FP8 in blocks"
        return Algorithm(name, "fp8", group_rows=sizes[0], group_size=sizes[1], layout="scale_inv")
    scheme = fields.get("activation_scheme")
    if scheme not in (None, "dynamic", "static"):
        raise fields.wrong("activation_scheme", "expected 'dynamic' or 'static'")
    return Algorithm("FP8", "fp8", activations=True, static=scheme == "static", layout="scale_inv")


def _read_gptq(fields: Fields) -> Quantization:
    """GPTQ keeps integers in words of 32 bits. Source: GPTQModel 7.7."""
    key = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    stored = fields.get(key)
    if stored is not None and (not isinstance(stored, str) or stored not in _GPTQ):
        raise fields.wrong(key, f"supported are 'gptq' and 'gptq_v2'; {_HOW}")
    default = _integers(fields, _GPTQ[stored])
    head = fields.boolean("lm_head", default=False)
    return Quantization(fields.path, default, {} if head else {_HEAD: None}, _dynamic(fields, default))


def _dynamic(fields: Fields, default: Algorithm) -> tuple[Rule, ...]:
    """Overrides by regular expression, the first that matches: "-:" leaves a layer as it is."""
    overridden = fields.section("dynamic")
    if overridden is None:
        return ()
    check_count(fields, "dynamic", list(overridden.values))
    rules = []
    for key in overridden.values:
        pattern = regex(overridden, key, key.removeprefix("-:").removeprefix("+:"))
        if key.startswith("-:"):
            rules.append(Rule(pattern))
            continue
        overrides = overridden.section(key)
        rules.append(Rule(pattern, default if overrides is None else _changed(overrides, default)))
    return tuple(rules)


def _read_awq(fields: Fields) -> Quantization:
    """AWQ does, too. Source: AutoAWQ 0.2.9."""
    version = fields.get("version")
    if not isinstance(version, str | None) or (version or "gemm").lower() != "gemm":
        raise fields.wrong("version", f"supported is 'gemm'; {_HOW}")
    group = "group_size" if fields.get("group_size") is not None else "q_group_size"
    bits = stated([(fields, "bits"), (fields, "w_bit")], Fields.integer)
    if bits != 4:
        raise fields.error("bits", f"is {bits}, supported is 4; {_HOW}")
    if not fields.boolean("zero_point", default=True):
        raise fields.error("zero_point", f"is false, supported is true; {_HOW}")
    size = _group_size(fields, group)
    default = Algorithm("AWQ", "int4", group_size=size, zero_points=True, layout="awq")
    return Quantization(fields.path, default, {_HEAD: None}, named(fields, "modules_to_not_convert"))


def _changed(fields: Fields, default: Algorithm) -> Algorithm | None:
    """The algorithm of layers with settings of their own; None where they have 16 bits or more."""
    bits = stated([(fields, "bits")], Fields.integer)
    if bits is not None and bits >= 16:
        return None
    size = stated([(fields, "group_size")], _group_size)
    return replace(
        default,
        scheme=default.scheme if bits is None else _scheme(fields, bits),
        group_size=default.group_size if size is None else size,
        ordered=fields.boolean("desc_act", default=default.ordered),
    )


def _integers(fields: Fields, layout: FileLayout) -> Algorithm:
    """Zero points are in every file, also those of symmetric weights, whose zero points are all the middle."""
    scheme = _scheme(fields, fields.integer("bits"))
    size = _group_size(fields, "group_size")
    if fields.get("is_marlin_format"):
        raise fields.error("is_marlin_format", f"is true: Marlin's layout is not supported; {_HOW}")
    ordered = fields.boolean("desc_act", default=False)
    return Algorithm("GPTQ", scheme, group_size=size, zero_points=True, ordered=ordered, layout=layout)


def _scheme(fields: Fields, bits: int) -> str:
    if bits not in (4, 8):
        raise fields.error("bits", f"is {bits}, supported are 4 and 8; {_HOW}")
    return f"int{bits}"


def _group_size(fields: Fields, key: str) -> int:
    """-1: a group is a row."""
    size = fields.integer(key, minimum=-1, default=128)
    if size == -1:
        return 0
    if size == 0 or size % BLOCK:
        raise fields.error(key, f"is {size}, expected -1 or a multiple of {BLOCK}; {_HOW}")
    return size


def _read_gguf(fields: Fields) -> Quantization:
    """What checkpoint/gguf.py writes: the type of each layer that is not in floating point."""
    types = fields.needed("layers", "the types of layers")
    kinds = {name: types.string(name, among=GGUF) for name in types.values}
    return Quantization(fields.path, None, {n: GGUF[kind] for n, kind in kinds.items()})


_READERS: Mapping[str, Callable[[Fields], Quantization]] = {
    "modelopt": _read_modelopt,
    "compressed-tensors": read_compressed_tensors,
    "fp8": _read_fp8,
    "mxfp8": _read_fp8,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "gguf": _read_gguf,
}
