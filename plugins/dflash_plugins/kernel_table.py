"""The kernels that torch and plans of TensorRT both launch: inputs, outputs, sizes and launch of each.

launch.py calls them with tensors, and plugins.py from plans. Arguments of a kernel are its inputs, then integers, then
outputs, the order in which TensorRT has them. Attributes become constants of the compiled kernel. Nothing here imports
torch, Triton or TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dflash_plugins import kernel_specs as uses
from dflash_trt.errors import BuildError
from dflash_trt.formats.numbers import CACHE_SCALE_BYTES

Shape = tuple[Any, ...]
Outputs = dict[str, tuple[Shape, str]]


@dataclass(frozen=True)
class Kernel:
    """A kernel and its launch. The functions get `s`, the shapes of inputs by name, None for those that are missing,
    and `a`, the attributes by name. For `outputs`, a size that a plan leaves open is a symbol with +, *, // and
    `minimum`. `use` and `tiles` read no such size, because TensorRT keeps one kernel for all.

    inputs: names of the tensors that are read. The last ones may be missing. The last one stands for several tensors if
        the kernel's argument is a tuple.
    like: the input whose type the kernel computes in.
    outputs: shape and type of each; "" is the type of `like`.
    use: the kernel to compile, from sizes, attributes, the type of `like`, and a tile.
    grid: the number of its programs, for a tile.
    integers: its integer arguments.
    attributes: the types of those that a plan's node has.
    flags: attributes of calls alone; False in a plan.
    tiles: alternative tile sizes.
    most: an input, an axis, and the largest size that the kernel takes.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: Callable[[Any, Any], Outputs]
    use: Callable[[Any, Any, str, Any], uses.Use]
    grid: Callable[[Any, Any, Any], Shape]
    integers: Callable[[Any, Any], dict[str, Any]] = lambda s, a: {}
    attributes: Mapping[str, type] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    like: str = ""
    tiles: Callable[[Any], Sequence[Any]] = lambda s: (None,)
    most: tuple[str, int, int] | None = None

    def sizes(self, shapes: Sequence[Any]) -> SimpleNamespace:
        """`s` of these shapes, in the order of `inputs`."""
        return SimpleNamespace(**dict.fromkeys(self.inputs) | dict(zip(self.inputs, shapes, strict=False)))

    def given(self, attributes: Mapping[str, Any]) -> SimpleNamespace:
        """`a` of these attributes."""
        return SimpleNamespace(**dict.fromkeys(self.flags, False) | dict(attributes))

    def check(self, s: Any) -> None:
        """Raise BuildError if a size is more than the kernel takes."""
        if self.most is not None:
            name, axis, most = self.most
            if (size := getattr(s, name)[axis]) > most:
                raise BuildError(f"{self.name}: size {axis} of {name} is {size}, expected {most} or less")


def _rows(s: Any) -> Any:
    return s.logits[0] * s.logits[1]


def _tiles(s: Any) -> Any:
    return uses.ceil_div(s.logits[2], uses.TILE_TOKENS)


def _head_dim(cache: Shape, a: Any) -> Any:
    """Numbers of a head, which a graph fixes for caches."""
    return cache[3] - (CACHE_SCALE_BYTES if a.fp8 else 0)


def _splits(q: Shape, cache: Shape, a: Any) -> uses.AttentionSplits:
    return uses.AttentionSplits(
        q[0], cache[1], q[2] * a.group, a.most or cache[2], _head_dim(cache, a), windowed=a.windowed
    )


def _attended(s: Any, a: Any) -> Outputs:
    """TensorRT sizes memory at a profile's largest shapes, where one program may take all parts. So a plan's outputs
    have rows for any shapes; a call has its own.
    """
    splits = _splits(s.q, s.k_cache, a)
    rows = splits.splits * s.q[0] * s.q[1] * s.q[2] if a.exact else splits.kept
    return {
        "partial": ((rows, _head_dim(s.k_cache, a)), "fp32"),
        "largest": ((rows,), "fp32"),
        "total": ((rows,), "fp32"),
    }


def _routed(s: Any, a: Any) -> Outputs:
    rows, experts = s.router_logits[0], s.router_logits[1]
    outputs: Outputs = {name: ((rows, a.k), kind) for name, kind in (("shares", "fp32"), ("chosen", "i32"))}
    if not a.grouped:
        outputs["counts"] = (uses.ceil_div(rows, uses.ROUTE_ROWS), experts), "i32"
    if s.x is not None:
        outputs["arranged"] = (s.x[0], uses.in_blocks(s.x[1])), ""
    return outputs | _grouped(rows, experts, a) if a.grouped else outputs


def _grouped(rows: Any, experts: Any, a: Any) -> Outputs:
    return {"pairs": ((rows * a.k,), "i32"), "groups": ((experts, 3), "i32")}


_SAMPLED = ("logits", "temperature", "top_p", "seed", "position")
_PARTIAL = ("group_max", "group_noise", "tile_max", "tile_sum", "tile_weight")

SAMPLE_TILES = Kernel(
    "SampleTiles",
    _SAMPLED,
    outputs=lambda s, a: {
        **dict.fromkeys(_PARTIAL[:2], ((_rows(s), _tiles(s) * uses.TILE_GROUPS), "fp32")),
        **dict.fromkeys(_PARTIAL[2:4], ((_rows(s), _tiles(s)), "fp32")),
        "tile_weight": ((_rows(s), _tiles(s)), "i64"),
    },
    use=lambda s, a, dtype, t: uses.sample_tiles(s.logits[2]),
    grid=lambda s, a, t: (_tiles(s), _rows(s)),
    integers=lambda s, a: {"rows_per_sequence": s.logits[1]},
)
SAMPLE_SELECT = Kernel(
    "SampleSelect",
    ("logits", "temperature", "reach", "top_k", "top_p", "seed", "position", *_PARTIAL),
    outputs=lambda s, a: {
        "shortlist": ((_rows(s), _tiles(s) * uses.TILE_GROUPS), "i32"),
        "sampled": ((s.logits[0], s.logits[1]), "i64"),
        "logprob": ((s.logits[0], s.logits[1]), "fp32"),
    },
    use=lambda s, a, dtype, t: uses.sample_select(s.logits[2]),
    grid=lambda s, a, t: (_rows(s),),
    integers=lambda s, a: {"rows_per_sequence": s.logits[1]},
)
ACCEPT_BLOCK = Kernel(
    "AcceptBlock",
    ("tokens", "rows", "sampled"),
    outputs=lambda s, a: dict.fromkeys(("accepted", "next_token"), ((s.tokens[0],), "i64")),
    use=lambda s, a, dtype, t: uses.accept_block(),
    grid=lambda s, a, t: (s.tokens[0],),
    integers=lambda s, a: {"tokens_per_sequence": s.tokens[1], "nodes_per_sequence": s.rows[1]},
    most=("rows", 1, uses.ACCEPT_NODES),
)
HIDDEN_STATE_TAP = Kernel(
    "HiddenStateTap",
    ("taps",),
    attributes={"n": int},
    outputs=lambda s, a: {"features": ((s.taps[0], s.taps[1] * a.n), "")},
    use=lambda s, a, dtype, t: uses.gather_taps(a.n, s.taps[1], dtype),
    grid=lambda s, a, t: (s.taps[0], a.n),
    like="taps",
)
MOE_ROUTE = Kernel(
    "MoERoute",
    ("router_logits", "x"),
    attributes={"k": int},
    flags=("grouped",),
    outputs=_routed,
    use=lambda s, a, dtype, t: uses.route(
        s.router_logits[1], a.k, 0 if s.x is None else s.x[1], dtype, grouped=a.grouped
    ),
    grid=lambda s, a, t: (
        uses.ceil_div(s.router_logits[0], uses.ROUTE_ROWS)
        + (0 if s.x is None else s.x[0] * uses.ceil_div(s.x[1], uses.ARRANGE_BLOCK)),
    ),
    integers=lambda s, a: {"rows": s.router_logits[0]},
    like="x",
)
MOE_GROUP = Kernel(
    "MoEGroup",
    ("chosen", "counts"),
    attributes={"k": int},
    outputs=lambda s, a: _grouped(s.chosen[0], s.counts[1], a),
    use=lambda s, a, dtype, t: uses.group(s.counts[1], a.k),
    grid=lambda s, a, t: (uses.ceil_div(s.chosen[0], uses.ROUTE_ROWS),),
    integers=lambda s, a: {"rows": s.chosen[0]},
)
MOE_GATE_UP = Kernel(
    "MoEGateUp",
    ("x", "pairs", "groups", "blocks", "scales", "bias"),
    attributes={"k": int, "alpha": float, "beta": float, "limit": float},
    outputs=lambda s, a: {"activated": ((s.pairs[0], uses.in_blocks(s.blocks[1] // 2)), "")},
    use=lambda s, a, dtype, t: uses.gate_up(
        *(s.blocks[2] * 32, s.blocks[1] // 2, a.k, a.alpha, a.beta, a.limit, dtype, s.bias is not None, t)
    ),
    grid=lambda s, a, t: (
        uses.ceil_div(2 * uses.in_blocks(s.blocks[1] // 2), t.rows),
        min(s.blocks[0], s.pairs[0]),
    ),
    like="x",
    tiles=lambda s: uses.TILES,
)
MOE_DOWN = Kernel(
    "MoEDown",
    ("activated", "shares", "pairs", "groups", "blocks", "scales", "bias"),
    outputs=lambda s, a: {"outputs": ((s.pairs[0] * uses.DOWN_PARTS, s.blocks[1]), "fp32")},
    use=lambda s, a, dtype, t: uses.down(s.blocks[1], s.blocks[2] * 32, dtype, s.bias is not None, t),
    grid=lambda s, a, t: (
        uses.ceil_div(s.blocks[1], t.rows) * uses.DOWN_PARTS,
        min(s.blocks[0], s.pairs[0]),
    ),
    like="activated",
    tiles=lambda s: uses.TILES,
)
MOE_COMBINE = Kernel(
    "MoECombine",
    ("outputs", "like"),
    attributes={"k": int},
    outputs=lambda s, a: {"y": ((s.like[0], s.like[1]), "")},
    use=lambda s, a, dtype, t: uses.combine(s.like[1], a.k, dtype),
    grid=lambda s, a, t: (s.like[0], uses.ceil_div(s.like[1], uses.COMBINE_BLOCK)),
    like="like",
)
GATED_DELTA_NET = Kernel(
    "GatedDeltaNet",
    ("q", "k", "v", "gates", "state", "pending_gates", "replayed", "certain", "begun"),
    outputs=lambda s, a: {
        "y": ((s.gates[0], s.gates[1], s.v[2]), "fp32"),
        "state_out": (tuple(s.state[i] for i in range(4)), "fp32"),
        "pending_gates_out": (tuple(s.pending_gates[i] for i in range(3)), "fp32"),
    },
    use=lambda s, a, dtype, t: uses.delta_rows(
        *(s.q[2] // s.state[2], s.state[1], s.state[2], s.state[3], s.pending_gates[1])
    ),
    grid=lambda s, a, t: (uses.ceil_div(s.state[3], uses.DELTA_COLUMNS), s.state[0] * s.state[1]),
    integers=lambda s, a: {"count": s.gates[1]},
)
ATTEND = Kernel(
    "Attend",
    ("q", "k_cache", "v_cache", "first", "last", "start", "visible", "region"),
    attributes={"group": int, "windowed": int},
    flags=("exact", "most", "fp8"),
    outputs=_attended,
    use=lambda s, a, dtype, t: uses.attend(
        *(s.k_cache[1], a.group, _head_dim(s.k_cache, a), dtype, t),
        tree=s.visible is not None,
        region=s.region is not None,
        fp8=a.fp8,
        windowed=bool(a.windowed),
    ),
    grid=lambda s, a, t: (
        uses.ceil_div(s.q[2] * a.group, t.rows),
        s.q[0] * s.k_cache[1],
        _splits(s.q, s.k_cache, a).splits,
    ),
    integers=lambda s, a: {
        "count": s.q[2],
        "capacity": s.k_cache[2],
        "splits": _splits(s.q, s.k_cache, a).splits,
    },
    like="q",
    tiles=lambda s: uses.attention_tiles(s.k_cache[3]),
)
MERGE_ATTENTION = Kernel(
    "MergeAttention",
    ("partial", "largest", "total", "like", "cache", "sinks"),
    attributes={"group": int, "heads": int, "windowed": int},
    flags=("by_row", "most", "fp8"),
    outputs=lambda s, a: {"y": (tuple(s.like[i] for i in ((0, 2, 1, 3) if a.by_row else range(4))), "")},
    use=lambda s, a, dtype, t: uses.merge(
        a.heads, s.partial[1], dtype, sinks=s.sinks is not None, by_row=a.by_row
    ),
    grid=lambda s, a, t: (s.like[0] * s.like[1] * s.like[2],),
    integers=lambda s, a: {
        "rows": s.like[0] * s.like[1] * s.like[2],
        "count": s.like[2],
        "splits": _splits(s.like, s.cache, a).splits,
    },
    like="like",
)
KERNELS = (
    *(SAMPLE_TILES, SAMPLE_SELECT, ACCEPT_BLOCK, HIDDEN_STATE_TAP, MOE_ROUTE, MOE_GROUP, MOE_GATE_UP),
    *(MOE_DOWN, MOE_COMBINE, GATED_DELTA_NET, ATTEND, MERGE_ATTENTION),
)
