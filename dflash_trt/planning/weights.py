"""The weights of a pair as an engine's build has them on one GPU."""

from __future__ import annotations

from typing import TypeGuard

from dflash_trt.engines import registry
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.formats import FORMATS, INT4
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.int8 import INT8
from dflash_trt.graph.tensorrt_experts import at_a_time
from dflash_trt.models.inventory import NUMBER_BYTES, Inventory, weight_bytes
from dflash_trt.planning.settings import Settings


def weights_of(inventory: Inventory, s: Settings, side: str) -> dict[str, dict[str, int]]:
    """Bytes of the weights of "target" or "drafter" on one GPU, by role and format, as a build has them."""
    scheme = s.precision.scheme(side)
    in_blocks = registry.find(s.engine).weight_layout == "blocks"
    largest = _largest_group(scheme) if in_blocks else None
    roles = inventory.weights(side, s.compute(side), scheme, s.tensor_parallel, largest)
    if largest == 0 and "experts" in roles:  # these stay in groups
        in_groups = inventory.weights(side, s.compute(side), scheme, s.tensor_parallel, BLOCK)
        roles["experts"] = in_groups["experts"]
    if in_blocks and side == "target" and _integer(scheme):
        # The head has the target's format too. The table of a tied embedding stays beside it, as it is on disk.
        roles["head"] = _head(inventory, scheme, largest, inventory.target.vocab_size)
        roles["embedding"] = dict(inventory.stored("target")["embedding"])
        roles |= {role: _on_this_processor(sizes) for role, sizes in roles.items() if role != "experts"}
    whole = inventory.target.vocab_size
    rows = inventory.draft_rows if registry.find(s.engine).draft_vocabulary else whole
    if side == "drafter" and s.precision.head is not None:  # its own copy of the target's head
        largest = _largest_group(s.precision.head) if in_blocks else None
        roles["head"] = _head(inventory, s.precision.head, largest, rows)
    elif side == "drafter" and rows < whole:
        roles["head"] = _head(inventory, s.compute("drafter"), largest, rows)
    elif in_blocks and side == "drafter":  # the sessions of both models hold the head that they multiply
        target = s.precision.scheme("target")
        stored = target if _integer(target) else s.compute("target")
        head = _head(inventory, stored, _largest_group(stored), whole)
        roles["head"] = _on_this_processor(head)
    return roles


def _largest_group(precision: str | None) -> int:
    """Weights that share a scale in a build for ONNX Runtime on this machine, at most; 0: those of an output."""
    if precision != INT8.name:
        return BLOCK
    from dflash_trt.engines.onnxruntime.products import channels_pay

    return 0 if channels_pay() else BLOCK


def _on_this_processor(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of a target's layers in blocks. A build gives INT4's numbers eight bits where it must."""
    if INT4.name not in sizes:
        return sizes
    from dflash_trt.engines.onnxruntime.products import fewest_rows

    if fewest_rows(4) is not None:
        return sizes
    # A block of 32 numbers has one scale in float32.
    return sizes | {INT4.name: sizes[INT4.name] * (32 + 4) // (16 + 4)}


def _integer(scheme: str | None) -> TypeGuard[str]:
    return scheme is not None and FORMATS[scheme].integer_bits is not None


def _head(inventory: Inventory, precision: str, largest_group: int | None, rows: int) -> dict[str, int]:
    columns = inventory.target.hidden_size
    form, group = FORMATS.get(precision), 0
    if form is not None:
        group = form.algorithm(calibrated=False, inputs=[columns]).group_size
        group = group if largest_group is None else min(group, largest_group)
    return {precision: weight_bytes(precision, rows * columns, rows, group)}


def experts_scratch(inventory: Inventory, s: Settings, *, packed: bool) -> int:
    """Memory of one product over experts: the rows of a prompt chunk, and widened copies of packed weights."""
    moe = inventory.target.moe
    if moe is None or s.traits.has_expert_kernels(moe.quantization, s.gpu.sm):
        return 0
    hidden, element = inventory.target.hidden_size, NUMBER_BYTES[s.compute("target")]
    size = round(2 * moe.intermediate_size * hidden * element)
    count = at_a_time(moe.num_experts, size) if packed else moe.num_experts
    rows = PREFILL_CHUNK * count * (moe.intermediate_size + hidden) * element
    return round(rows) + count * size * packed
