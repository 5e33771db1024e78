"""The ONNX operators that the dialect `torch` emits (dflash_trt/graph/torch.py), each a short function of tensors.

`a` are a node's attributes. An input that is a shape, an axis or a count (HOST) is a list of numbers, or one number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from dflash_plugins.packed import PackedWeight
from onnx_ir.tensor_adapters import to_torch_dtype

from dflash_trt.engines.torch import layers, packed
from dflash_trt.formats.numbers import E4M3_MAX

Tensor = torch.Tensor
Attributes = Mapping[str, Any]
Operator = Callable[..., Any]
# Up to so many numbers are sorted whole, so that the first of equal ones is the first. Experts are chosen so, and
# drafts, which decide no token, are not.
_SORTED = 1024

# The inputs that are numbers of the host.
HOST: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "Expand", "Unsqueeze", "Squeeze", "Split", "TopK"), (1,)),
    **dict.fromkeys(("ReduceMax", "ReduceMin", "ReduceSum", "ReduceLogSumExp"), (1,)),
    **dict.fromkeys(("Slice",), (1, 2, 3, 4)),
    "Range": (0, 1, 2),
    "Pad": (1,),
    "PlaceHeads": (1,),
    "ProductHeads": (4,),
    "Gate": (1,),
}


def _reshape(a: Attributes, x: Tensor, shape: list[int]) -> Tensor:
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)])


def _constant(a: Attributes) -> Tensor:
    value = next(v for name, v in a.items() if name.startswith("value"))
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _gemm(a: Attributes, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, PackedWeight):
        return packed.linear(a, x, weight, bias)
    assert a.get("alpha", 1.0) == a.get("beta", 1.0) == 1.0
    x, weight = x.t() if a.get("transA") else x, weight if a.get("transB") else weight.t()
    return F.linear(x, weight, bias)


def _divide(a: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _folded(function: Operator) -> Operator:
    """An operator of any number of inputs."""

    def run(a: Attributes, x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = function(x, other)
        return x

    return run


def _split(a: Attributes, x: Tensor, sizes: list[int] | None = None) -> Any:
    axis = a.get("axis", 0)
    return torch.split(x, sizes or -(-x.shape[axis] // a["num_outputs"]), axis)


def _unsqueeze(a: Attributes, x: Tensor, axes: list[int]) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _slice(
    a: Attributes,
    x: Tensor,
    starts: list[int],
    ends: list[int],
    axes: list[int] | None = None,
    steps: list[int] | None = None,
) -> Tensor:
    parts = [slice(None)] * x.ndim
    several = zip(starts, ends, axes or range(len(starts)), steps or [1] * len(starts), strict=True)
    for start, end, axis, step in several:
        parts[axis] = slice(start, end, step)
    return x[tuple(parts)]


def _gather(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis, flat = a.get("axis", 0) % x.ndim, index.reshape(-1)
    flat = flat.clamp(max=x.shape[axis] - 1)
    # On a GPU, torch selects up to 16 rows by a kernel that takes 5 to 10 times as long as that of indexing.
    found = x[flat] if axis == 0 and x.is_cuda else x.index_select(axis, flat)
    return found.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _gather_nd(a: Attributes, x: Tensor, index: Tensor) -> Tensor:
    """Entries of x, apart for each place of its first `batch_dims` axes."""
    axes = a.get("batch_dims", 0)
    places = [
        torch.arange(x.shape[axis], device=x.device).reshape(-1, *[1] * (index.ndim - 2 - axis))
        for axis in range(axes)
    ]
    return x[(*places, *index.unbind(-1))]


def _top_k(a: Attributes, x: Tensor, k: list[int]) -> Any:
    axis, count = a.get("axis", -1), k[0]
    if x.shape[axis] > _SORTED:
        return torch.topk(x, count, axis)
    values, indices = torch.sort(x, dim=axis, descending=True, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


def _reduced(function: Operator) -> Operator:
    """A reduction over some axes, or over all."""

    def run(a: Attributes, x: Tensor, axes: list[int] | None = None) -> Any:
        chosen = tuple(axes) if axes is not None else tuple(range(x.ndim))
        return function(x, chosen, keepdim=bool(a.get("keepdims", 1)))

    return run


def _pad(a: Attributes, x: Tensor, pads: list[int], value: Tensor | None = None) -> Tensor:
    rank = len(pads) // 2
    by_axis = [n for i in reversed(range(rank)) for n in (pads[i], pads[rank + i])]
    return F.pad(x, by_axis, value=0 if value is None else value.item())


def _quantize(a: Attributes, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """To E4M3, saturating."""
    assert a.get("output_dtype") == 17
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _swish(a: Attributes, x: Tensor) -> Tensor:
    assert a.get("alpha", 1.0) == 1.0
    return F.silu(x)


OPERATORS: dict[str, Operator] = {
    "Abs": lambda a, x: x.abs(),
    "Add": lambda a, x, y: x + y,
    "AddNorm": layers.add_norm,
    "And": lambda a, x, y: x & y,
    "ArgMax": lambda a, x: x.argmax(a.get("axis", 0), keepdim=bool(a.get("keepdims", 1))),
    "Attend": layers.attend,
    "BestToken": layers.best_token,
    "BlockAcceptance": layers.block_acceptance,
    "Cast": lambda a, x: x.to(to_torch_dtype(a["to"])),
    "Clip": lambda a, x, low, high: torch.clamp(x, low, high),
    "Concat": lambda a, *xs: torch.cat(xs, a["axis"]),
    "Constant": _constant,
    "Cos": lambda a, x: x.cos(),
    "DequantizeLinear": lambda a, x, scale: x.to(torch.float32) * scale,
    "Div": _divide,
    "Equal": lambda a, x, y: x == y,
    "Exp": lambda a, x: x.exp(),
    # Contiguous, because every layer's kernel would copy the rows that it sees otherwise.
    "Expand": lambda a, x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape))).contiguous(),
    "Floor": lambda a, x: x.floor(),
    "Gate": layers.gate,
    "GatedDeltaNet": layers.gated_delta_net,
    "Gather": _gather,
    "GatherElements": lambda a, x, index: torch.gather(x, a.get("axis", 0), index.long()),
    "GatherND": _gather_nd,
    "Gelu": lambda a, x: F.gelu(x, approximate=a.get("approximate", "none")),
    "Gemm": _gemm,
    "Greater": lambda a, x, y: x > y,
    "GreaterOrEqual": lambda a, x, y: x >= y,
    "GroupedProduct": layers.grouped_product,
    "Identity": lambda a, x: x,
    "Less": lambda a, x, y: x < y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "Log": lambda a, x: x.log(),
    "LogSoftmax": lambda a, x: x.log_softmax(a.get("axis", -1)),
    "MXFP4Experts": layers.mxfp4_experts,
    "MatMul": lambda a, x, y: x @ y,
    "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum),
    "Mul": lambda a, x, y: x * y,
    "Neg": lambda a, x: -x,
    "NormRouter": layers.norm_router,
    "Pad": _pad,
    "PlaceHeads": layers.place_heads,
    "Pow": lambda a, x, y: x**y,
    "ProductHeads": packed.product_heads,
    "QuantizeLinear": _quantize,
    "QuantizedRows": layers.quantized_rows,
    "RMSNormalization": layers.rms_norm,
    "Range": lambda a, start, end, step: torch.arange(start, end, step),
    "Reciprocal": lambda a, x: 1 / x,
    "ReduceLogSumExp": _reduced(torch.logsumexp),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin),
    "ReduceSum": _reduced(torch.sum),
    "Reshape": _reshape,
    "RotaryEmbedding": layers.rotary,
    "Route": layers.route,
    "Router": layers.router,
    "Round": lambda a, x: x.round(),
    "ScaledProduct": packed.scaled_product,
    "Shape": lambda a, x: torch.tensor(x.shape[a.get("start", 0) : a.get("end")], dtype=torch.int64),
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Sin": lambda a, x: x.sin(),
    "Slice": _slice,
    "Softmax": lambda a, x: x.softmax(a.get("axis", -1)),
    "Softplus": lambda a, x: F.softplus(x),
    "Split": _split,
    "Squeeze": lambda a, x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(axes)),
    "Sub": lambda a, x, y: x - y,
    "Swish": _swish,
    "Tanh": lambda a, x: x.tanh(),
    "TopK": _top_k,
    "Transpose": lambda a, x: x.permute(a["perm"]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda a, condition, x, y: torch.where(condition, x, y),
    "Widened": packed.weight,
    "WriteRows": layers.write_rows,
}
