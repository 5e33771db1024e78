"""`quantization_config` of GPTQ, AWQ and AutoRound, which keep integers in words of 32 bits.

Sources: GPTQModel 7.7, AutoAWQ 0.2.9, auto-round 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rules import Quantization, Rule, check_count, named, regex, text_name
from dflash_trt.errors import show
from dflash_trt.formats import Algorithm
from dflash_trt.formats.base import BLOCK, FileLayout

_HOW = "fetch another quantization of the model, or quantize the original with: dflash-trt quantize"
_HEAD = "lm_head"
# checkpoint_format -> layout; v1 stores every zero point less one.
_GPTQ: Mapping[object, FileLayout] = {None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}
_AUTOROUND: Mapping[object, FileLayout] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
_COMPRESSED = "auto_round:llm_compressor"


def read_gptq(fields: Fields) -> Quantization:
    """Raises CheckpointError, naming the field, for what no reader here understands."""
    key = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    stored = fields.get(key)
    if stored is not None and (not isinstance(stored, str) or stored not in _GPTQ):
        raise fields.error(key, f"is {show(stored)}, supported are 'gptq' and 'gptq_v2'; {_HOW}")
    default = _integers(fields, _GPTQ[stored], "GPTQ", ordered=fields.boolean("desc_act", default=False))
    head = fields.boolean("lm_head", default=False)
    return Quantization(fields.path, default, {} if head else {_HEAD: None}, _dynamic(fields, default))


def _dynamic(fields: Fields, default: Algorithm) -> tuple[Rule, ...]:
    """Overrides by regular expression, the first that matches: "-:" leaves a layer as it is."""
    each = fields.section("dynamic")
    if each is None:
        return ()
    check_count(fields, "dynamic", list(each.values))
    rules = []
    for key in each.values:
        pattern = regex(each, key, key.removeprefix("-:").removeprefix("+:"))
        if key.startswith("-:"):
            rules.append(Rule(pattern))
            continue
        overrides = each.section(key)
        rules.append(Rule(pattern, default if overrides is None else _changed(overrides, default)))
    return tuple(rules)


def read_awq(fields: Fields) -> Quantization:
    """As `read_gptq`."""
    version = fields.get("version")
    if not isinstance(version, str | None) or (version or "gemm").lower() != "gemm":
        raise fields.error("version", f"is {show(version)}, supported is 'gemm'; {_HOW}")
    group = "group_size" if fields.get("group_size") is not None else "q_group_size"
    bits = stated([(fields, "bits"), (fields, "w_bit")], Fields.integer)
    if bits != 4:
        raise fields.error("bits", f"is {bits}, supported is 4; {_HOW}")
    if not fields.boolean("zero_point", default=True):
        raise fields.error("zero_point", f"is false, supported is true; {_HOW}")
    size = _group_size(fields, group)
    default = Algorithm("AWQ", "int4", group_size=size, zero_points=True, layout="awq")
    return Quantization(fields.path, default, {_HEAD: None}, named(fields, "modules_to_not_convert"))


def read_autoround(fields: Fields) -> Quantization:
    """As `read_gptq`. AutoRound packs in any of the other ways."""
    stored = fields.get("packing_format")
    if rotation := fields.get("rotation_config"):
        raise fields.error("rotation_config", f"is {show(rotation)}, expected none; {_HOW}")
    if stored == _COMPRESSED:
        default = _compressed(fields)
    elif isinstance(stored, str) and stored in _AUTOROUND:
        if fields.integer("act_bits", default=16) < 16:
            raise fields.error("act_bits", f"is {fields.get('act_bits')}, supported is 16; {_HOW}")
        _check_data_type(fields)
        default = _integers(fields, _AUTOROUND[stored], "AutoRound", ordered=False)
    else:
        expected = ", ".join(repr(name) for name in (*_AUTOROUND, _COMPRESSED))
        raise fields.error("packing_format", f"is {show(stored)}, supported are: {expected}; {_HOW}")
    layers: dict[str, Algorithm | None] = {}
    rules = []
    extra = fields.section("extra_config") or Fields(fields.path, {})
    for key in extra.values:
        if (section := extra.section(key)) is not None:
            layers[text_name(key)] = changed = _changed(section, default)
            if re.search(r"[*+?\\^$|(\[]", key):
                rules.append(Rule(regex(extra, key, rf".*?(?:{key})"), changed))
    check_count(fields, "extra_config", rules)
    blocks = fields.get("block_name_to_quantize") or fields.get("to_quant_block_names")
    if isinstance(blocks, str):
        blocks = blocks.split(",")
    if blocks:
        each = Fields(fields.path, {"block_name_to_quantize": blocks}, fields.prefix)
        names = each.strings("block_name_to_quantize", most=1024)
        rules += [Rule(re.compile(re.escape(text_name(name.strip()))), default) for name in names]
        return Quantization(fields.path, None, layers, tuple(rules))
    layers.setdefault(_HEAD, None)
    return Quantization(fields.path, default, layers, tuple(rules))


def _compressed(fields: Fields) -> Algorithm:
    """AutoRound's weights as compressed-tensors packs them: NVFP4, MXFP4 or MXFP8."""
    kind, bits = fields.get("data_type"), fields.integer("bits")
    inputs = fields.integer("act_bits", default=16) < 16
    family = kind[:5] if isinstance(kind, str) else kind
    if family == "nv_fp" and bits == 4:
        rounded = {"activations": inputs, "static": inputs}
        return Algorithm("NVFP4", "nvfp4", **rounded, group_size=16, reciprocal=True, layout="packed")
    if family == "mx_fp" and bits == 4:
        return Algorithm("MXFP4", "mxfp4", group_size=BLOCK, layout="packed")
    if family == "mx_fp" and bits == 8:
        return Algorithm("MXFP8", "fp8", group_size=BLOCK)
    raise fields.error(
        "data_type", f"is {show(kind)} with {bits} bits, supported are nv_fp4, mx_fp4 and mx_fp8; {_HOW}"
    )


def _check_data_type(fields: Fields) -> None:
    kind = fields.get("data_type")
    if kind not in (None, "int", "int_sym", "int_asym", "int_asym_dq"):
        raise fields.error("data_type", f"is {show(kind)}, supported is 'int'; {_HOW}")


def _changed(fields: Fields, default: Algorithm) -> Algorithm | None:
    """The algorithm of layers with settings of their own; None where they have 16 bits or more."""
    bits = stated([(fields, "bits")], Fields.integer)
    if bits is not None and bits >= 16:
        return None
    if default.scheme not in ("int4", "int8"):
        if fields.values.keys() & {"bits", "group_size", "data_type"}:
            raise fields.error("bits", f"is {show(bits)}, but {default.name} has no other layers; {_HOW}")
        return default
    _check_data_type(fields)
    size = stated([(fields, "group_size")], _group_size)
    return replace(
        default,
        scheme=default.scheme if bits is None else _scheme(fields, bits),
        group_size=default.group_size if size is None else size,
        ordered=fields.boolean("desc_act", default=default.ordered),
    )


def _integers(fields: Fields, layout: FileLayout, name: str, *, ordered: bool) -> Algorithm:
    """Zero points are in every file, also those of symmetric weights, whose zero points are all the middle."""
    scheme = _scheme(fields, fields.integer("bits"))
    size = _group_size(fields, "group_size")
    if fields.get("is_marlin_format"):
        raise fields.error("is_marlin_format", f"is true: Marlin's layout is not supported; {_HOW}")
    if layout == "awq" and scheme != "int4":
        raise fields.error("bits", f"is {fields.get('bits')}, supported for AWQ's packing is 4; {_HOW}")
    return Algorithm(name, scheme, group_size=size, zero_points=True, ordered=ordered, layout=layout)


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
