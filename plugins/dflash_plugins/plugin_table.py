"""The plugins that a plan may have: one for each kernel, with its inputs, outputs, sizes and launch.

TensorRT passes inputs, then integers, then outputs; the kernels' arguments have the same order. Attributes become
constants of the compiled kernel. registration.py and rtx.py register them. Nothing here imports TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_plugins import kernel_specs as uses
from dflash_trt.errors import BuildError, BundleError

# Increment when a plugin's inputs, outputs or results change, and when the noise or weights of decoding/ change. It is
# part of the plugins' names and of a bundle's manifest.
VERSION = 4
NAMESPACE = "dflash"
# The largest number of taps of a supported drafter.
MAX_TAPS = 16
# Names in trt.DataType -> names in Triton.
TYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16"}

Attributes = Mapping[str, Any]
Shape = tuple[Any, ...]  # ints and symbolic dimensions


def versioned(name: str) -> str:
    """The name under which a plugin is registered."""
    return f"{name}_v{VERSION}"


def check_version(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a plan whose plugins follow other rules than this version's host code. `where` names the bundle.

    Raises BundleError.
    """
    version = manifest.get("tensorrt", {}).get("plugins", {}).get("version", VERSION)
    if version != VERSION:
        raise BundleError(
            f"{where}: manifest.json tensorrt.plugins.version is {version!r}, expected {VERSION}: the plans hold "
            "kernels of another version of dflash-trt; build the bundle again"
        )


@dataclass(frozen=True)
class Symbols:
    """The dimensions of a plugin's inputs as TensorRT's symbols, and the operations on them."""

    shapes: Sequence[Any]
    ceil_div: Callable[[Any, int], Any]
    minimum: Callable[[Any, Any], Any]

    def __getitem__(self, i: int) -> Any:
        return self.shapes[i]


@dataclass(frozen=True)
class Sizes:
    """The sizes and types of a plugin's inputs, for choosing its kernel.

    TensorRT keeps one kernel for all profiles. So a kernel may depend on sizes that the graph fixes, and on no other.
    """

    name: str
    inputs: Sequence[Any]

    def fixed(self, i: int, axis: int) -> int:
        """A size that a kernel is compiled for. Raises BuildError if it is dynamic."""
        size = int(self.inputs[i].shape[axis])
        if size < 0:
            raise BuildError(
                f"{self.name}: size {axis} of input {i} is dynamic, expected one that the graph fixes"
            )
        return size

    def check(self, i: int, axis: int, most: int) -> None:
        """Raise BuildError if a profile has more than a kernel takes."""
        shape = self.inputs[i].shape
        largest = int(shape.max[axis] if shape[axis] < 0 else shape[axis])
        if largest > most:
            raise BuildError(f"{self.name}: size {axis} of input {i} is {largest}, expected {most} or less")

    def type(self, i: int) -> str:
        """The type of an input. Raises BuildError for a type that no kernel supports."""
        name = self.inputs[i].dtype.name
        if name not in TYPES:
            raise BuildError(f"{self.name}: input {i} is {name}, expected one of: {', '.join(TYPES)}")
        return TYPES[name]


@dataclass(frozen=True)
class Plugin:
    """A plugin: its outputs, and the kernel that computes them.

    outputs: shape and type of each. A type is a name, or the index of an input with the same type.
    use: the kernel.
    grid: the number of its programs.
    integers: its integer arguments.
    tiles: alternative tile sizes, for sizes that the graph fixes.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: Callable[[Symbols, Attributes], list[tuple[Shape, str | int]]]
    use: Callable[[Sizes, Attributes, Any], uses.Use]
    grid: Callable[[Symbols, Attributes, Any], Shape]
    integers: Callable[[Symbols, Attributes], Shape] = lambda s, a: ()
    attributes: Mapping[str, type] = field(default_factory=dict)
    tiles: Callable[[Sizes], Sequence[uses.Tile] | Sequence[uses.AttentionTile]] | None = None

    def kinds(self, attributes: Attributes) -> list[str | int]:
        """The type of each output, as in `outputs`."""
        ones = Symbols([(1,) * 4] * len(self.inputs), lambda a, b: 1, min)
        return [kind for _, kind in self.outputs(ones, attributes)]


def _tiles(s: Symbols) -> Any:
    return s.ceil_div(s[0][2], uses.TILE_TOKENS)


def _taps(n: int) -> Plugin:
    return Plugin(
        f"HiddenStateTap{n}",
        tuple(f"h_{i}" for i in range(n)),
        outputs=lambda s, a: [((s[0][0], s[0][1] * n), 0)],
        use=lambda z, a, t: uses.gather_taps(n, z.fixed(0, 1), z.type(0)),
        grid=lambda s, a, t: (s[0][0], n),
    )


def _splits(s: Symbols, q: Shape, cache: Shape, group: int) -> uses.AttentionSplits:
    return uses.AttentionSplits(q[0], cache[1], q[2] * group, cache[2], cache[3], s.ceil_div, s.minimum)


def _attend(name: str, *tree: str) -> Plugin:
    """Attention to the cache rows in parts. TensorRT sizes memory at a profile's largest shapes, where one program may
    take all parts. So the outputs have rows for any shapes.
    """

    def splits(s: Symbols, a: Attributes) -> uses.AttentionSplits:
        return _splits(s, s[0], s[1], a["group"])

    def outputs(s: Symbols, a: Attributes) -> list[tuple[Shape, str | int]]:
        rows = splits(s, a).kept
        return [((rows, s[1][3]), "FLOAT"), ((rows,), "FLOAT"), ((rows,), "FLOAT")]

    return Plugin(
        name,
        ("q", "k_cache", "v_cache", "first", "last", *tree),
        attributes={"group": int},
        outputs=outputs,
        use=lambda z, a, t: uses.attend(
            z.fixed(1, 1), a["group"], z.fixed(1, 3), z.type(0), t, tree=bool(tree)
        ),
        grid=lambda s, a, t: (
            s.ceil_div(s[0][2] * a["group"], t.rows),
            s[0][0] * s[1][1],
            splits(s, a).splits,
        ),
        integers=lambda s, a: (s[0][2], s[1][2], splits(s, a).splits),
        tiles=lambda z: uses.attention_tiles(z.fixed(1, 3)),
    )


def _merge(name: str, *sinks: str) -> Plugin:
    """The parts of a row put together. The number of parts follows from the shapes, as in `_attend`."""

    return Plugin(
        name,
        ("partial", "largest", "total", "like", "cache", *sinks),
        attributes={"group": int, "heads": int},
        outputs=lambda s, a: [((s[3][0], s[3][1], s[3][2], s[3][3]), 3)],
        use=lambda z, a, t: uses.merge(a["heads"], z.fixed(0, 1), z.type(3), sinks=bool(sinks)),
        grid=lambda s, a, t: (s[3][0] * s[3][1] * s[3][2],),
        integers=lambda s, a: (
            *(s[3][0] * s[3][1] * s[3][2], s[3][2]),
            _splits(s, s[3], s[4], a["group"]).splits,
        ),
    )


def _accept(z: Sizes, a: Attributes, t: None) -> uses.Use:
    z.check(1, 1, uses.ACCEPT_NODES)
    return uses.accept_block()


_SAMPLING = ("logits", "temperature", "top_p", "seed", "position")
_PARTIAL = ("group_max", "group_noise", "tile_max", "tile_sum", "tile_weight")

PLUGINS = (
    Plugin(
        "SampleTiles",
        _SAMPLING,
        outputs=lambda s, a: (
            [((s[0][0] * s[0][1], _tiles(s) * uses.TILE_GROUPS), "FLOAT")] * 2
            + [((s[0][0] * s[0][1], _tiles(s)), kind) for kind in ("FLOAT", "FLOAT", "INT64")]
        ),
        use=lambda z, a, t: uses.sample_tiles(z.fixed(0, 2)),
        grid=lambda s, a, t: (_tiles(s), s[0][0] * s[0][1]),
        integers=lambda s, a: (s[0][1],),
    ),
    Plugin(
        "SampleSelect",
        ("logits", "temperature", "reach", "top_k", "top_p", "seed", "position", *_PARTIAL),
        outputs=lambda s, a: [
            ((s[0][0] * s[0][1], _tiles(s) * uses.TILE_GROUPS), "INT32"),
            ((s[0][0], s[0][1]), "INT64"),
            ((s[0][0], s[0][1]), "FLOAT"),
        ],
        use=lambda z, a, t: uses.sample_select(z.fixed(0, 2)),
        grid=lambda s, a, t: (s[0][0] * s[0][1],),
        integers=lambda s, a: (s[0][1],),
    ),
    Plugin(
        "AcceptBlock",
        ("tokens", "rows", "sampled"),
        outputs=lambda s, a: [((s[0][0],), "INT64"), ((s[0][0],), "INT64")],
        use=_accept,
        grid=lambda s, a, t: (s[0][0],),
        integers=lambda s, a: (s[0][1], s[1][1]),
    ),
    Plugin(
        "MoERoute",
        ("router_logits", "x"),
        attributes={"k": int},
        outputs=lambda s, a: [
            ((s[0][0], a["k"]), "FLOAT"),
            ((s[0][0], a["k"]), "INT32"),
            ((s.ceil_div(s[0][0], uses.ROUTE_ROWS), s[0][1]), "INT32"),
            ((s[1][0], s.ceil_div(s[1][1], uses.BLOCK_K) * uses.BLOCK_K), 1),
        ],
        use=lambda z, a, t: uses.route(z.fixed(0, 1), a["k"], z.fixed(1, 1), z.type(1)),
        grid=lambda s, a, t: (
            s.ceil_div(s[0][0], uses.ROUTE_ROWS) + s[1][0] * s.ceil_div(s[1][1], uses.ARRANGE_BLOCK),
        ),
        integers=lambda s, a: (s[0][0],),
    ),
    Plugin(
        "MoEGroup",
        ("chosen", "counts"),
        attributes={"k": int},
        outputs=lambda s, a: [((s[0][0] * a["k"],), "INT32"), ((s[1][1], 3), "INT32")],
        use=lambda z, a, t: uses.group(z.fixed(1, 1), a["k"]),
        grid=lambda s, a, t: (s.ceil_div(s[0][0], uses.ROUTE_ROWS),),
        integers=lambda s, a: (s[0][0],),
    ),
    Plugin(
        "MoEGateUp",
        ("x", "pairs", "groups", "blocks", "scales", "bias"),
        attributes={"k": int, "alpha": float, "beta": float, "limit": float},
        outputs=lambda s, a: [((s[1][0], s.ceil_div(s[3][1], 2 * uses.BLOCK_K) * uses.BLOCK_K), 0)],
        use=lambda z, a, t: uses.gate_up(
            *(z.fixed(3, 2) * 32, z.fixed(3, 1) // 2, a["k"], a["alpha"], a["beta"], a["limit"]),
            *(z.type(0), True, t),
        ),
        grid=lambda s, a, t: (
            s.ceil_div(s[3][1], 2 * uses.BLOCK_K) * (2 * uses.BLOCK_K // t.rows),
            s.minimum(s[3][0], s[1][0]),
        ),
        tiles=lambda z: uses.TILES,
    ),
    Plugin(
        "MoEDown",
        ("activated", "shares", "pairs", "groups", "blocks", "scales", "bias"),
        outputs=lambda s, a: [((s[2][0] * uses.DOWN_PARTS, s[4][1]), "FLOAT")],
        use=lambda z, a, t: uses.down(z.fixed(4, 1), z.fixed(4, 2) * 32, z.type(0), True, t),
        grid=lambda s, a, t: (
            s.ceil_div(s[4][1], t.rows) * uses.DOWN_PARTS,
            s.minimum(s[4][0], s[2][0]),
        ),
        tiles=lambda z: uses.TILES,
    ),
    Plugin(
        "MoECombine",
        ("parts", "like"),
        attributes={"k": int},
        outputs=lambda s, a: [((s[1][0], s[1][1]), 1)],
        use=lambda z, a, t: uses.combine(z.fixed(1, 1), a["k"], z.type(1)),
        grid=lambda s, a, t: (s[1][0], s.ceil_div(s[1][1], uses.COMBINE_BLOCK)),
    ),
    Plugin(
        "GatedDeltaNet",
        ("q", "k", "v", "gates", "state", "pending_gates", "replayed", "certain", "begun"),
        outputs=lambda s, a: [
            ((s[3][0], s[3][1], s[2][2]), "FLOAT"),
            ((s[4][0], s[4][1], s[4][2], s[4][3]), "FLOAT"),
            ((s[5][0], s[5][1], s[5][2]), "FLOAT"),
        ],
        use=lambda z, a, t: uses.delta_rows(
            z.fixed(0, 2) // z.fixed(4, 2), z.fixed(4, 1), z.fixed(4, 2), z.fixed(4, 3), z.fixed(5, 1)
        ),
        grid=lambda s, a, t: (s.ceil_div(s[4][3], uses.DELTA_COLUMNS), s[4][0] * s[4][1]),
        integers=lambda s, a: (s[3][1],),
    ),
    _attend("Attend"),
    _attend("AttendTree", "start", "visible"),
    _merge("MergeAttention"),
    _merge("MergeSinkAttention", "sinks"),
    *(_taps(n) for n in range(1, MAX_TAPS + 1)),
)
