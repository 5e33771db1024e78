"""`quantization_config` of GPTQ and AWQ, which keep integers in words of 32 bits.

Sources: GPTQModel 7.7, AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rules import Quantization, Rule, check_count, named, regex
from dflash_trt.errors import show
from dflash_trt.formats import Algorithm
from dflash_trt.formats.base import BLOCK, FileLayout

_HOW = "fetch another quantization of the model, or quantize the original with: dflash-trt quantize"
_HEAD = "lm_head"
# checkpoint_format -> layout; v1 stores every zero point less one.
_GPTQ: Mapping[object, FileLayout] = {None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}


def read_gptq(fields: Fields) -> Quantization:
    """Raises CheckpointError, naming the field, for what no reader here understands."""
    key = "checkpoint_format" if fields.get("checkpoint_format") is not None else "format"
    stored = fields.get(key)
    if stored is not None and (not isinstance(stored, str) or stored not in _GPTQ):
        raise fields.error(key, f"is {show(stored)}, supported are 'gptq' and 'gptq_v2'; {_HOW}")
    default = _integers(fields, _GPTQ[stored])
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
