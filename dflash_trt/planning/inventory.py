"""The tensors of a pair by its configurations: shapes as the graphs want them, bytes in any precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dflash_trt.checkpoint.config import DecoderConfig, DrafterConfig, TargetConfig
from dflash_trt.checkpoint.roles import parameters_of, role_of
from dflash_trt.checkpoint.tensors import Outline, TensorInfo
from dflash_trt.graph.functions import OnnxRuntime
from dflash_trt.models.drafter import build_drafter
from dflash_trt.models.target import build_target

# Bytes per weight, scales included: one FP8 scale per 16 weights of NVFP4, one E8M0 per 32 of MXFP4, one FP16 per
# 32 of INT4. FP8's scales are per tensor or channel.
WEIGHT_BYTES: Mapping[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2 / 32,
}
_LINEAR = ("attention", "mlp", "experts")
_STORED = {"F32": "fp32", "BF16": "bf16", "F16": "fp16", "F8_E4M3": "fp8", "F4": "nvfp4", "U8": "fp4"}


@dataclass(frozen=True)
class Inventory:
    """Both models' configurations and the tensors that follow from them, of "target" and of "drafter".

    `stored`: those of the target are a checkpoint's own, and count as they lie on disk.
    """

    target: TargetConfig
    drafter: DrafterConfig
    tensors: Mapping[str, tuple[TensorInfo, ...]]
    stored: bool = False

    def with_stored(self, tensors: Mapping[str, TensorInfo]) -> Inventory:
        """The same with the target's tensors as a checkpoint has them."""
        return replace(self, tensors={**self.tensors, "target": tuple(tensors.values())}, stored=True)

    def config(self, side: str) -> DecoderConfig:
        return self.target if side == "target" else self.drafter

    def weights(
        self,
        side: str,
        dense: str = "bf16",
        scheme: str | None = None,
        tensor_parallel: int = 1,
    ) -> dict[str, dict[str, int]]:
        """Bytes on one GPU by role and precision.

        `dense` is what floating-point tensors are held in, `scheme` what the matrices of attention, MLPs and experts
        are. Experts stored as MXFP4 stay so unless a scheme says otherwise.
        """
        totals: dict[str, Counter[str]] = {}
        for tensor in self.tensors[side]:
            role = role_of(tensor.name)
            precision = "mxfp4" if tensor.dtype == "U8" else dense
            if role in _LINEAR and len(tensor.shape) > 1 and scheme is not None:
                precision = scheme
            if side == "target" and self.stored:
                precision, count = _STORED.get(tensor.dtype, tensor.dtype), tensor.nbytes
            elif precision == "mxfp4" and tensor.dtype == "U8":
                count = tensor.nbytes
            else:
                count = round(parameters_of(tensor) * WEIGHT_BYTES[precision])
            parts = self.shards(side, tensor, tensor_parallel)
            totals.setdefault(role, Counter())[precision] += count // parts
        return {role: dict(totals[role]) for role in sorted(totals)}

    def shards(self, side: str, tensor: TensorInfo, tensor_parallel: int) -> int:
        """Over how many GPUs a tensor is spread. Keys and values have no more parts than there are heads of them."""
        role = role_of(tensor.name)
        if role in ("norm", "router", "fc"):
            return 1
        if ".k_proj." in tensor.name or ".v_proj." in tensor.name:
            return min(tensor_parallel, self.config(side).num_key_value_heads)
        return tensor_parallel


def take_inventory(target: TargetConfig, drafter: DrafterConfig) -> Inventory:
    """List what both graphs ask of their checkpoints. Nothing but the configurations is read."""
    outlines = {"target": Outline(target.path.parent), "drafter": Outline(drafter.path.parent)}
    taps, dialect = drafter.target_layer_ids, OnnxRuntime()
    build_target(target, outlines["target"], taps, dialect, folder="target")
    build_drafter(
        drafter,
        outlines["drafter"],
        target,
        outlines["target"],
        dialect,
        folder="drafter",
        target_folder="target",
    )
    return Inventory(
        target, drafter, {side: tuple(outline.tensors.values()) for side, outline in outlines.items()}
    )
