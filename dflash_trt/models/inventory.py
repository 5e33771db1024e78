"""The tensors of a pair, from its configurations: shapes as in the graphs, bytes in any precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dflash_trt.checkpoint.draft_vocabulary import FILE, read_draft_vocabulary
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.rules import Quantization
from dflash_trt.checkpoint.schema import DecoderConfig, DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, TensorInfo, parameters_of, role_of
from dflash_trt.errors import UsageError
from dflash_trt.formats import FORMATS, MXFP4
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.module import cache_scales
from dflash_trt.models.target import build_target

# Bytes per number in floating point, or in an FP8 cache.
NUMBER_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_LINEAR = ("attention", "mlp", "experts", "fc")


def weight_bytes(precision: str, parameters: int, rows: int, group_size: int = 0) -> int:
    """Bytes of matrices with this many rows, in floating point or in a number format with its scales."""
    form = FORMATS.get(precision)
    return parameters * NUMBER_BYTES[precision] if form is None else form.nbytes(parameters, rows, group_size)


class _Traits(NamedTuple):
    """The properties of a tensor that a plan needs."""

    role: str
    quantized: str | None
    matrix: bool
    spread: str


class _Size(NamedTuple):
    """The numbers, bytes and rows of matrices in some tensors."""

    parameters: int
    nbytes: int
    rows: int


@dataclass(frozen=True)
class Inventory:
    """The configurations and tensors of the models, by side: "target" and, if there is one, "drafter".

    "borrowed": those tensors of the target that the drafter reads too: embedding and head, as far as it has none.
    """

    target: TargetConfig
    drafter: DrafterConfig | None
    tensors: Mapping[str, tuple[TensorInfo, ...]]

    @property
    def sides(self) -> tuple[str, ...]:
        return ("target",) if self.drafter is None else ("target", "drafter")

    @property
    def configs(self) -> tuple[DecoderConfig, ...]:
        return tuple(map(self.config, self.sides))

    def config(self, side: str) -> DecoderConfig:
        return self.drafter if side == "drafter" and self.drafter else self.target

    def weights(
        self,
        side: str,
        dense: str = "bf16",
        scheme: str | None = None,
        tensor_parallel: int = 1,
        largest_group: int | None = None,
    ) -> dict[str, dict[str, int]]:
        """Bytes on one GPU, by role and precision.

        `dense` is the dtype of floating-point tensors. `scheme` is the format of linear layers, except the head.
        At most `largest_group` of their weights share a scale. Tensors that are already quantized stay as they are.
        """
        kv_parts = min(tensor_parallel, self.config(side).num_key_value_heads)
        parts = {"whole": 1, "kv": kv_parts, "split": tensor_parallel}
        group = 0 if scheme is None else self.group_size(side, scheme)
        if largest_group is not None:
            group = min(group, largest_group)
        sizes = []
        for traits, size in self._sizes[side].items():
            precision, count = traits.quantized, size.nbytes
            if precision is None:
                precision = scheme if traits.role in _LINEAR and traits.matrix and scheme else dense
                count = weight_bytes(precision, size.parameters, size.rows, group)
            sizes.append((traits.role, precision, count // parts[traits.spread]))
        return _totals(sizes)

    def stored(self, side: str) -> dict[str, dict[str, int]]:
        """Bytes in the checkpoint, by role and storage dtype or format."""
        return _totals((role_of(t.name), t.dtype.lower(), t.nbytes) for t in self.tensors[side])

    def parameters(self, side: str) -> dict[str, int]:
        """Numbers in the tensors of a model, by role, in any precision."""
        totals: Counter[str] = Counter()
        for traits, size in self._sizes[side].items():
            totals[traits.role] += size.parameters
        return dict(totals)

    @cached_property
    def _sizes(self) -> dict[str, dict[_Traits, _Size]]:
        """The tensors of each side, summed by their traits."""
        by_side: dict[str, dict[_Traits, _Size]] = {}
        for side, tensors in self.tensors.items():
            quantization = read_quantization(self.config(side).path.parent)
            sizes = by_side.setdefault(side, {})
            for tensor in tensors:
                role, matrix = role_of(tensor.name), _is_matrix(tensor)
                traits = _Traits(role, _quantized(tensor, quantization), matrix, _spread(role, tensor.name))
                parameters, rows = parameters_of(tensor, quantization), math.prod(tensor.shape[:-1])
                before = sizes.get(traits, (0, 0, 0))
                more = (parameters, tensor.nbytes, rows * matrix)
                sizes[traits] = _Size(*map(sum, zip(before, more, strict=True)))
        return by_side

    @cached_property
    def draft_rows(self) -> int:
        """Rows of the head that the drafter takes from its target: those of its draft vocabulary, by default all.

        0: it has a head of its own, or there is no drafter.
        """
        if self.drafter is None:
            return 0
        file = self.drafter.path.parent / FILE
        whole = self.target.vocab_size
        if self.drafter.own_head or any(t.name == "lm_head.weight" for t in self.tensors["drafter"]):
            return 0
        if not file.is_file():
            return whole
        return len(read_draft_vocabulary(file, whole))

    def group_size(self, side: str, scheme: str) -> int:
        """Weights per scale, as `dflash-trt quantize` chooses them."""
        inputs = {t.shape[-1] for t in self.tensors[side] if _is_matrix(t) and role_of(t.name) in _LINEAR}
        return FORMATS[scheme].algorithm(inputs=sorted(inputs)).group_size


def _totals(sizes: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """Bytes by role and precision, from parts of them."""
    totals: dict[str, Counter[str]] = {}
    for role, precision, nbytes in sizes:
        totals.setdefault(role, Counter())[precision] += nbytes
    return {role: dict(totals[role]) for role in sorted(totals)}


def _is_matrix(tensor: TensorInfo) -> bool:
    """Whether rows are multiplied with the tensor. A convolution's weights are not such a matrix."""
    return len(tensor.shape) > 1 and not tensor.name.endswith("conv1d.weight")


def _quantized(tensor: TensorInfo, quantization: Quantization) -> str | None:
    """The format of a quantized tensor or of what says how to read it; None for a tensor in floating point."""
    if tensor.name.endswith(("_blocks", "_scales")):
        return MXFP4.name
    if tensor.dtype in FLOAT_DTYPES and parameters_of(tensor):
        return None
    if tensor.name.endswith(".weight_zero_term"):  # what ONNX Runtime adds to products of a GGUF file's codes
        return "fp32"
    algorithm = quantization.algorithm(tensor.name.rpartition(".")[0])
    return tensor.dtype.lower() if algorithm is None else algorithm.scheme


def _spread(role: str, name: str) -> str:
    """How GPUs share a tensor. Keys and values have at most one part per key/value head."""
    if role in ("norm", "router", "fc"):
        return "whole"
    return "kv" if ".k_proj." in name or ".v_proj." in name else "split"


def take_inventory(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    checkpoints: Sequence[Checkpoint | Outline] | None = None,
) -> Inventory:
    """List the tensors of the models. Without `checkpoints`, the configurations alone determine them.

    Any linear layer, also of experts, may be stored in one of Model Optimizer's formats. The tensors of a family that
    this package does not read are taken as the checkpoint has them.

    Raises:
        CheckpointError: a checkpoint lacks a tensor, has it in another form, or has an unused one.
        UsageError: there is no checkpoint of a target of a family that is not read.
    """
    family = target.architecture in FAMILIES
    if not family and checkpoints is None:
        raise UsageError(
            f"{target.path.parent}: the sizes of a {target.architecture} are those of its weights; give a directory "
            "that has them, and leave --weights none out"
        )
    # The graphs determine names and shapes, and are discarded.
    folders = [config.path.parent for config in (target, drafter) if config]
    if checkpoints and target.moe is not None and target.moe.stacked:
        stacked = any(name.endswith("experts.gate_up_proj") for name in checkpoints[0].tensors)
        target = replace(target, moe=replace(target.moe, stacked=stacked))
    plain = [Outline(folder, Quantization(folder)) for folder in folders]
    taps, dialect = drafter.target_layer_ids if drafter else (), OnnxRuntime()
    if family:
        build_target(target, plain[0], taps, dialect, folder="target")
    stored = checkpoints or [Outline(folder) for folder in folders]
    tied = target.tie_word_embeddings  # also where a GGUF file's embedding is a quantized head, too
    ignored = [name for name in stored[0].tensors if tied and name.startswith("lm_head.")]
    tensors = {
        "target": (
            _as_stored(plain[0], stored[0], ignored, target.skipped)
            if family
            else (*stored[0].tensors.values(),)
        )
    }
    if drafter is None:
        return Inventory(target, None, tensors)
    borrowed = Outline(folders[0], Quantization(folders[0]))
    parts = DrafterParts(drafter, plain[1], target, borrowed, dialect, "drafter", "target")
    build_drafter(parts)
    tensors["drafter"] = _as_stored(plain[1], stored[1])
    layers = {name.rpartition(".")[0] for name in borrowed.tensors}
    tensors["borrowed"] = tuple(t for t in tensors["target"] if t.name.rpartition(".")[0] in layers)
    return Inventory(target, drafter, tensors)


def _as_stored(
    plain: Outline,
    checkpoint: Checkpoint | Outline,
    ignored: Sequence[str] = (),
    skipped: tuple[str, ...] = (),
) -> tuple[TensorInfo, ...]:
    """The checkpoint's tensors in place of those of a model in floating point."""
    stored: dict[str, TensorInfo] = {}
    for tensor in plain.tensors.values():
        layer, _, end = tensor.name.rpartition(".")
        may_be_linear = role_of(tensor.name) in (*_LINEAR, "head", "router") and end == "weight"
        linear = None
        if may_be_linear and len(tensor.shape) == 2:
            linear = stored_linear(checkpoint, layer, *reversed(tensor.shape))
        if linear is not None:
            stored |= {info.name: info for info in linear.tensors}
        else:
            dtypes = FLOAT_DTYPES if tensor.dtype in FLOAT_DTYPES else (tensor.dtype,)
            stored[tensor.name] = checkpoint.expect(tensor.name, tensor.shape, dtypes)
    left = cache_scales(checkpoint, {*stored, *ignored}, skipped)
    return (*stored.values(), *(checkpoint.tensors[name] for name in left))
