"""The compilation of each kernel for given sizes: argument types, constants, warps.

Calls and plans both launch these (kernel_table.py), so a plan contains the kernels that the tests run. Type names are
Triton's. Nothing here imports triton.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from typing import Any

# The lowest version of PTX that has all instructions, which drivers from CUDA 12.8 on read.
PTX_VERSION = 87
# Compute capability -> its tensor-core instruction in PTX.
TARGETS = {89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
# The kernels between passes have no instruction that later GPUs add. So their PTX is compiled once, for the oldest GPU,
# and a driver translates it for its own.
ROUND_TARGET = 80
# The most that a launch gets without asking for more, which TensorRT cannot. What a kernel takes depends on Triton's
# version.
SHARED_BYTES = 48 << 10
# The most that our own launches ask for, of products whose tiles are timed: GPUs have 99 KiB from 8.0 on. On sm_100,
# three stages of 64 rows take 16 bytes more than the above.
ASKED_BYTES = 96 << 10
TILE_TOKENS = 4096  # as in kernels/sampling.py
TILE_GROUPS = 128


# Types of the arguments that are not constants, by name, in any order. A tuple argument has a tuple of types.
Types = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Use:
    """One kernel to be compiled: `function` of `module` in kernels/."""

    module: str
    function: str
    types: Types
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    # Off where sums must be rounded as on the host: kernels/noise.py.
    fp_fusion: bool = False
    # Of a thread. None lets the assembler choose.
    most_registers: int | None = None

    @cached_property
    def digest(self) -> str:
        """Names the kernel among others: 32 hexadecimal digits of all of the above."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Triton's options for it."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.most_registers}
        return options | {"enable_fp_fusion": self.fp_fusion}

    @cached_property
    def launch(self) -> dict[str, Any]:
        """Keyword arguments of a launch by Triton."""
        return self.constants | self.options


@dataclass(frozen=True)
class Tile:
    """Tile sizes of the experts' grouped products: rows of the weights and tokens of a step, warps, pipeline stages."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


# For the few tokens of a verification, for more, and for the many of a prefill: the fastest on an H100 at 1 to 64 rows
# and at 512, and of the same bits there. TensorRT times those that fit, also the last two.
TILES = (
    Tile(64, 16, 4, 4),
    Tile(64, 32, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(128, 16, 8, 4),
    Tile(64, 8, 4, 4),
)
# The experts' kernels read the inputs of a layer in blocks of so many, whose columns are arranged: kernels/moe.py.
BLOCK_K = 128
DOWN_PARTS = 2  # of the inputs of `down`, each for a program of its own


def ceil_div(a: Any, b: int) -> Any:
    """a / b, rounded up, of a number or a symbol."""
    return (a + (b - 1)) // b


def least(a: Any, b: int) -> Any:
    """The smaller of a number or a symbol and a number."""
    return min(a, b) if isinstance(a, int) else a.minimum(b)


def in_blocks(columns: Any) -> Any:
    """Columns in whole blocks."""
    return ceil_div(columns, BLOCK_K) * BLOCK_K


def typed(**names: str) -> Types:
    """Types of arguments. A keyword is the type of numbers in memory, `scalar` of an int32; its value has the names."""
    kinds = {kind: "i32" if kind == "scalar" else f"*{kind}" for kind in names}
    return {name: kinds[kind] for kind, listed in names.items() for name in listed.split()}


def optional(types: Types, constants: dict[str, Any], present: bool, **arguments: Any) -> None:
    """Add arguments that a kernel may go without. Then they are a constant, None."""
    if present:
        types.update(arguments)
    else:
        constants.update(dict.fromkeys(arguments))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def vocabulary_tiles(vocab: int) -> int:
    """Tiles of TILE_TOKENS logits in a row."""
    return -(-vocab // TILE_TOKENS)


_SAMPLING = typed(
    fp32="logits temperature top_p group_max group_noise tile_max tile_sum",
    i64="seed position tile_weight",
    scalar="rows_per_sequence",
)


@cache
def sample_tiles(vocab: int) -> Use:
    """The kernel that sums up each tile of a row's logits."""
    return Use("sampling", "sample_tiles", _SAMPLING, {"VOCAB": vocab})


@cache
def sample_select(vocab: int) -> Use:
    """The kernel that selects a row's token from its tiles."""
    types = _SAMPLING | typed(fp32="reach logprob", i32="top_k shortlist", i64="sampled")
    tiles = vocabulary_tiles(vocab)
    slots = {"TILE_SLOTS": power_of_two(tiles), "GROUP_SLOTS": power_of_two(tiles * TILE_GROUPS)}
    constants = {"VOCAB": vocab, "TILES": tiles} | slots
    return Use("sampling", "sample_select", types, constants, num_warps=16)


# Of a request whose logits are adjusted: words that are excluded, and the bit of tokens of its prompt in their counts.
# What is more, the host adjusts.
ADJUST_WORDS = 128
ADJUST_BEFORE = 14
ADJUST_PROMPT = 1 << 30


def recent_tokens(most: int) -> int:
    """Tokens before an anchor that the host gives with a round of up to `most` nodes: those of two rounds."""
    return power_of_two(2 * most)


@cache
def read_texts(vocab: int, most: int) -> Use:
    """The kernel that reads answers so far, in rounds of up to `most` nodes."""
    types = typed(
        fp32="logits", i64="tokens start position facts words texts", i32="counts", scalar="nodes room"
    )
    constants = {"VOCAB": vocab, "RECENT": recent_tokens(most), "WORDS": ADJUST_WORDS}
    return Use("sampling", "read_texts", types, constants | {"SLOTS": power_of_two(most), "STEP": 1024})


@cache
def adjust_rows(vocab: int, most: int) -> Use:
    """The kernel that adjusts logits after that."""
    types = typed(fp32="logits factors bias", i64="tokens facts", u8="visible", i32="counts")
    types |= typed(scalar="nodes between across")
    constants = {"VOCAB": vocab, "RECENT": recent_tokens(most), "PROMPT": ADJUST_PROMPT}
    return Use("sampling", "adjust_rows", types, constants | {"STEP": 1024})


def sampling_bytes(batch: int, nodes: int, vocab: int, capacity: int) -> int:
    """Memory of the kernels that sample, for so many sequences of up to `nodes` rows and `capacity` positions: what
    tiles of each row give, and of each sequence counts, a bias and the text, beside less than 20 KiB.
    """
    tiles = vocabulary_tiles(vocab)
    return batch * (nodes * tiles * (12 * TILE_GROUPS + 16) + 8 * (vocab + capacity))


# The most nodes that the acceptance kernel takes, at any shape: two for each thread of its warp.
ACCEPT_NODES = 64


@cache
def accept_block() -> Use:
    """The acceptance kernel for up to ACCEPT_NODES nodes."""
    counts = "tokens_per_sequence nodes_per_sequence"
    types = typed(i64="tokens rows sampled accepted next_token", scalar=counts)
    return Use("rounds", "accept_block", types, {"SLOTS": ACCEPT_NODES}, num_warps=1)


COMPACT_WORDS = 64


@cache
def compact_rows(nodes: int) -> Use:
    """The kernel that moves up to `nodes` rows of each head of each cache."""
    types = typed(i64="caches", i32="heads words", scalar="slot start count capacity")
    types["nodes"] = ("i32",) * nodes
    constants = {"NODES": power_of_two(nodes), "WORDS": COMPACT_WORDS}
    return Use("rounds", "compact_rows", types, constants)


@cache
def fill_tokens(most: int) -> Use:
    """The kernel that joins anchors and drafts to blocks of up to `most` tokens."""
    types = typed(i64="block drafts tokens rows", scalar="nodes drafted width")
    return Use("rounds", "fill_tokens", types, {"SLOTS": power_of_two(most)}, num_warps=1)


@cache
def end_round(vocab: int, features: int, dtype: str, *, committing: bool) -> Use:
    """The kernel after the target's pass. With `committing`, it copies features of this type."""
    types = typed(fp32="logits", i32="counters finite", scalar="nodes room")
    types |= typed(**{dtype: "features unread"})
    constants: dict[str, Any] = {"VOCAB": vocab, "FEATURES": features}
    constants |= {"TILES": vocabulary_tiles(vocab), "TILE": TILE_TOKENS}
    optional(types, constants, committing, places="*i64")
    return Use("rounds", "end_round", types, constants)


def round_uses(vocab: int, features: int, dtype: str, block_size: int) -> tuple[Use, ...]:
    """The kernels between the passes of a pair: `features` numbers of a token, of this type, go to the drafter."""
    return (
        fill_tokens(block_size),
        *(end_round(vocab, features, dtype, committing=committing) for committing in (False, True)),
        *(read_texts(vocab, block_size), adjust_rows(vocab, block_size)),
        *(sample_tiles(vocab), sample_select(vocab), accept_block(), compact_rows(block_size)),
    )


@cache
def gather_taps(taps: int, hidden: int, dtype: str) -> Use:
    """The kernel that puts the rows of `taps` layers side by side."""
    types: Types = {"taps": (f"*{dtype}",) * taps, "features": f"*{dtype}"}
    return Use("rounds", "gather_taps", types, {"D": hidden, "SLOTS": power_of_two(hidden)})


# Rows of a program that routes, and programs whose counts are added in one step.
ROUTE_ROWS = 16
ROUTE_PARTS = 16
ARRANGE_BLOCK = 1024


@cache
def route(experts: int, k: int, hidden: int = 0, dtype: str = "", *, grouped: bool = False) -> Use:
    """The kernel that selects the k experts of each row. It arranges rows of `hidden` numbers of a type, if there are
    any, and with `grouped` it does what the next kernel does, for up to ROUTE_ROWS rows.
    """
    types = typed(fp32="router_logits shares", i32="chosen", scalar="rows")
    constants: dict[str, Any] = {"D": hidden, "BLOCK": ARRANGE_BLOCK} | _chosen(experts, k)
    optional(types, constants, hidden > 0, x=f"*{dtype}", arranged=f"*{dtype}")
    optional(types, constants, not grouped, counts="*i32")
    optional(types, constants, grouped, pairs="*i32", groups="*i32")
    warps = 8 if experts > 64 else 4  # four would spill the numbers of many experts
    return Use("moe", "route", types, constants, num_warps=warps, fp_fusion=True)


def _chosen(experts: int, k: int) -> dict[str, Any]:
    slots = {"E_SLOTS": power_of_two(experts), "K_SLOTS": power_of_two(k), "ROW_SLOTS": ROUTE_ROWS}
    return {"E": experts, "K": k} | slots


@cache
def group(experts: int, k: int) -> Use:
    """The kernel that groups pairs of a row and an expert by expert."""
    types = typed(i32="chosen counts pairs groups", scalar="rows")
    slots = {"E_SLOTS": power_of_two(experts), "ROW_SLOTS": ROUTE_ROWS, "PART_SLOTS": ROUTE_PARTS}
    return Use("moe", "group", types, {"E": experts, "K": k} | slots, fp_fusion=True)


@cache
def gate_up(
    hidden: int,
    inner: int,
    k: int,
    alpha: float,
    beta: float,
    limit: float,
    dtype: str,
    biased: bool,
    tile: Tile,
) -> Use:
    """The experts' first product, with their activation."""
    constants = {"K": k, "ALPHA": alpha, "BETA": beta, "LIMIT": limit, "D": hidden, "INNER": inner}
    types = typed(**{dtype: "x activated"})
    return _product("gate_up", types, constants, dtype, biased, tile)


@cache
def down(hidden: int, inner: int, dtype: str, biased: bool, tile: Tile) -> Use:
    """The experts' second product."""
    types: Types = {"activated": f"*{dtype}", "shares": "*fp32", "outputs": "*fp32"}
    span = in_blocks(-(-inner // DOWN_PARTS))
    constants = {"D": hidden, "INNER": inner, "PARTS": DOWN_PARTS, "SPAN": span}
    return _product("down", types, constants, dtype, biased, tile)


def _product(name: str, types: Types, constants: dict[str, Any], dtype: str, biased: bool, tile: Tile) -> Use:
    types |= typed(i32="pairs groups", u8="blocks scales")
    constants |= {"ROWS": tile.rows, "TOKENS": tile.tokens}
    optional(types, constants, biased, bias=f"*{dtype}")
    return Use("moe", name, types, constants, tile.num_warps, tile.num_stages, fp_fusion=True)


COMBINE_BLOCK = 1024


@cache
def combine(hidden: int, k: int, dtype: str) -> Use:
    """The kernel that adds the experts of each row."""
    types: Types = {"outputs": "*fp32", "like": f"*{dtype}", "y": f"*{dtype}"}
    constants = {"D": hidden, "PARTS": k * DOWN_PARTS, "BLOCK": COMBINE_BLOCK}
    return Use("moe", "combine", types, constants, fp_fusion=True)


@dataclass(frozen=True)
class AttentionTile:
    """Tile sizes of attention: rows of a program, slots of a step, warps, pipeline stages, and the columns of a head
    that are multiplied at a time, 0 for all.
    """

    rows: int
    slots: int
    num_warps: int
    num_stages: int
    columns: int = 0


# By the width of a head, rounded up to a power of two: for one or few rows, for a block, for the many rows of a
# prefill. TensorRT times those that fit its target. Of ten for blocks of 8 and 16 rows, those of 64 and 128 were the
# fastest on an H100, or close to it.
_ATTENTION_TILES = {
    64: ((16, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 2), (64, 64, 4, 2), (128, 32, 8, 2), (64, 16, 4, 2)),
    128: ((16, 32, 4, 2), (64, 16, 4, 3), (64, 32, 8, 2, 64), (64, 64, 4, 2, 64), (64, 64, 8, 2, 64)),
    256: ((16, 32, 4, 2), (32, 16, 4, 2), (32, 32, 8, 2, 64), (64, 32, 8, 2, 64), (64, 64, 8, 2, 64)),
    512: ((16, 16, 8, 1), (16, 32, 4, 2, 128), (32, 16, 8, 2, 64), (32, 32, 8, 2, 64), (64, 16, 8, 2, 64)),
}


@cache
def attention_tiles(head_dim: int) -> tuple[AttentionTile, ...]:
    """Tile shapes for heads of so many numbers. Those of 512 are also tried for wider ones."""
    shapes = _ATTENTION_TILES[min(512, max(64, power_of_two(head_dim)))]
    return tuple(AttentionTile(*shape) for shape in shapes)


# Attention adds in parts of the cache: 32 of 128 slots, 32 of twice as many, and so on (kernels/attention.py). So a
# few hundred tokens go to several programs, and 32,768 have few enough parts to be merged. In layers with a window
# rows move down by whole strides (`Dialect.window_stride`), so all parts have 128.
ATTENTION_PART = 128
ATTENTION_ALIKE = 32
ATTENTION_PARTS = 256  # the most; the last one has no end
ATTENTION_AHEAD = 8  # parts that `merge` reads at once
# Rows by which programs are counted, at any tile shape.
ATTENTION_ROWS = 64
# Up to so many programs over all parts, each part has a program of its own, so that few sequences fill a GPU (132 to
# 188 multiprocessors of H200, B200 and RTX PRO 6000), unless its results were more numbers than ATTENTION_KEPT.
ATTENTION_PROGRAMS = 64
ATTENTION_KEPT = 1 << 26


@dataclass(frozen=True)
class AttentionSplits:
    """Who adds the parts of a cache. For `kept`, `batch` and `rows` may be symbols (`kernel_table.Kernel`).

    rows: of one key head, in all. windowed: whether rows of the cache move down, so that all parts are alike.
    """

    batch: Any
    kv_heads: int
    rows: Any
    capacity: int
    head_dim: int
    windowed: bool = False

    @property
    def _programs(self) -> Any:
        """Those over all parts, one for each ATTENTION_ROWS rows."""
        return ceil_div(self.rows, ATTENTION_ROWS) * self.batch * self.kv_heads

    @property
    def _most(self) -> int:
        """The most programs whose results may be kept."""
        return int(ceil_div(ATTENTION_KEPT // ATTENTION_ROWS, self.head_dim))

    @property
    def parts(self) -> int:
        """Those of the whole cache."""
        begin, found, alike = 0, 0, parts_alike(windowed=self.windowed)
        for size in (ATTENTION_PART << i for i in range(ATTENTION_PARTS // alike)):
            left = ceil_div(max(self.capacity - begin, 0), size)
            found += min(left, alike)
            begin += alike * size
        return found

    @property
    def splits(self) -> int:
        """As many as parts if each has a program of its own, else 1."""
        few = self._programs <= ATTENTION_PROGRAMS and self._programs * self.parts <= self._most
        return self.parts if few else 1

    @property
    def kept(self) -> Any:
        """Rows of results for `merge`, for any number of sequences and rows up to these."""
        apart = least(self._programs, ATTENTION_PROGRAMS) * self.parts
        return (least(apart, self._most) + self._programs) * ATTENTION_ROWS


def parts_alike(*, windowed: bool) -> int:
    """The parts of a cache of the same size."""
    return ATTENTION_PARTS if windowed else ATTENTION_ALIKE


def attention_bytes(
    batch: int, kv_heads: int, rows: int, head_dim: int, capacity: int, *, windowed: bool = False
) -> int:
    """Memory of the parts' results in a plan, for up to so many sequences and rows of a key head."""
    splits = AttentionSplits(batch, kv_heads, rows, capacity, head_dim, windowed)
    return int(splits.kept) * (head_dim + 2) * 4


@cache
def attend(
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: str,
    tile: AttentionTile,
    *,
    tree: bool,
    region: bool = False,
    fp8: bool = False,
    windowed: bool = False,
) -> Use:
    """The kernel of one attention layer's parts, for heads in groups that share a key head."""
    types = typed(i64="first last", fp32="partial largest total", scalar="count capacity splits")
    types |= typed(**{dtype: "q"}) | typed(**{"u8" if fp8 else dtype: "k_cache v_cache"})
    constants = {"KV_HEADS": kv_heads, "GROUP": group, "PART": ATTENTION_PART} | _head(head_dim)
    constants |= {"ALIKE": parts_alike(windowed=windowed), "PARTS": ATTENTION_PARTS}
    constants |= {"ROWS": tile.rows, "SLOTS": tile.slots, "COLUMNS": tile.columns or constants["D_SLOTS"]}
    optional(types, constants, tree, start="*i64", visible="*i32")
    optional(types, constants, region, region="*i64")
    return Use("attention", "attend", types, constants, tile.num_warps, tile.num_stages, fp_fusion=True)


@cache
def merge(heads: int, head_dim: int, dtype: str, *, sinks: bool, by_row: bool = False) -> Use:
    """The kernel that joins the parts of `attend`, and adds a sink's share. `by_row`: heads beside each other."""
    types = typed(fp32="partial largest total", scalar="rows count splits") | typed(**{dtype: "like cache y"})
    constants = {"HEADS": heads, "PARTS": ATTENTION_PARTS, "BY_ROW": by_row} | _head(head_dim)
    constants |= {"AHEAD": ATTENTION_AHEAD}
    optional(types, constants, sinks, sinks=f"*{dtype}")
    warps = max(1, constants["D_SLOTS"] // 128)
    return Use("attention", "merge", types, constants, num_warps=warps, fp_fusion=True)


def _head(head_dim: int) -> dict[str, Any]:
    return {"D": head_dim, "D_SLOTS": max(16, power_of_two(head_dim))}


# Columns of a head's state in a program. One warp holds them, so that no sum waits for another warp.
DELTA_COLUMNS = 8


@cache
def delta_rows(key_heads: int, heads: int, key_dim: int, value_dim: int, pending: int) -> Use:
    """The kernel of a Gated DeltaNet layer, with `pending` rows that may be replayed. Not fused, so that a row's
    numbers are rounded alike wherever a compiler unrolls the loop.
    """
    numbers = "q k v gates state pending_gates begun y state_out pending_gates_out"
    types = typed(fp32=numbers, i64="replayed certain", scalar="count")
    constants = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": key_dim, "DV": value_dim, "PENDING": pending}
    constants |= {"DK_SLOTS": power_of_two(key_dim), "COLUMNS": DELTA_COLUMNS}
    # Left to itself, ptxas (12.9 to 13.4) takes 96 registers on sm_90, and sums up one column after the other.
    most = 128 if key_dim <= 128 else None  # keys of 256 numbers need more
    return Use("delta_net", "delta_rows", types, constants, num_warps=1, most_registers=most)


# How rows are rounded for a product: the format, and whether each row is divided by its largest magnitude first.
Rounding = tuple[str, bool]
# What numbers of a format are multiplied by: exact, and no sum of products in 16 bits overflows.
SHRUNK = {"fp8": 2.0**-9, "nvfp4": 2.0**-12}


def _rounding(types: Types, constants: dict[str, Any], dtype: str, rounding: Rounding | None) -> None:
    constants["SCHEME"], constants["BY_ROW"] = scheme, _ = rounding or (None, None)
    constants["SHRUNK"] = SHRUNK[scheme] if scheme else None
    optional(types, constants, rounding is not None, scale="*fp32", codes=f"*{dtype}", factor="*fp32")


def _row_warps(slots: int) -> int:
    return max(4, min(32, slots // 512))


@cache
def quantized_rows(size: int, dtype: str, rounding: Rounding) -> Use:
    """The kernel that rounds rows for a product."""
    types, slots = typed(**{dtype: "x"}), power_of_two(size)
    constants: dict[str, Any] = {"D": size, "D_SLOTS": slots}
    _rounding(types, constants, dtype, rounding)
    return Use("layers", "quantized_rows", types, constants, num_warps=_row_warps(slots))


@cache
def add_norm(
    hidden: int, epsilon: float, dtype: str, rounding: Rounding | None = None, parts: int = 0
) -> Use:
    """The kernel of a residual sum and the norm after it, which may be rounded for a product. parts: of experts, whose
    sum is added.
    """
    types = typed(**{dtype: "x weight total normed"}) | {"y": "*fp32" if parts else f"*{dtype}"}
    constants: dict[str, Any] = {"EPSILON": epsilon, "D": hidden, "D_SLOTS": power_of_two(hidden)}
    constants["PARTS"] = parts
    _rounding(types, constants, dtype, rounding)
    # Of parts, a thread then waits for half as many one after the other.
    return Use("layers", "add_norm", types, constants, num_warps=16 if parts else 8)


@cache
def place_heads(
    heads: int,
    keys: int,
    values: int,
    size: int,
    pairs: int,
    epsilon: float,
    dtype: str,
    *,
    present: tuple[str, ...],
    fp8: bool = False,
) -> Use:
    """The kernel of the norm, the rotation and the place of heads. `present`: the tensors that are there. `fp8`:
    whether caches are.
    """
    types: Types = {"x": f"*{dtype}", "count": "i32", "capacity": "i32"}
    constants: dict[str, Any] = {"H": heads, "KEYS": keys, "VALUES": values, "HALF": pairs}
    constants |= {"EPSILON": epsilon, "D": size, "D_SLOTS": power_of_two(size)}
    for name in ("q_norm", "k_norm", "cos", "sin", "q"):
        optional(types, constants, name in present, **{name: f"*{dtype}"})
    for name in ("k_cache", "v_cache"):
        optional(types, constants, name in present, **{name: "*u8" if fp8 else f"*{dtype}"})
    for name in ("start", "region"):
        optional(types, constants, name in present, **{name: "*i64"})
    return Use("layers", "place_heads", types, constants, num_warps=1)


GATE_BLOCK = 1024
ROUTER_OUTPUTS = 4


@cache
def gate(inner: int, dtype: str, rounding: Rounding | None = None) -> Use:
    """The kernel of a gated activation, which may be rounded for a product: then a program has a whole row."""
    types, block = typed(**{dtype: "x y"}), power_of_two(inner) if rounding else GATE_BLOCK
    constants: dict[str, Any] = {"INNER": inner, "BLOCK": block}
    _rounding(types, constants, dtype, rounding)
    return Use("layers", "gate", types, constants, num_warps=_row_warps(block) if rounding else 4)


@cache
def router(
    experts: int,
    hidden: int,
    dtype: str,
    *,
    biased: bool,
    epsilon: float | None = None,
    k: int = 0,
    arranged: bool = False,
) -> Use:
    """The kernel of a router's product. epsilon: of the norm of a sum before it; None: there is none. k: the experts
    that are chosen of each of up to ROUTE_ROWS rows; 0: they are not. arranged: whether norms are for MXFP4, too.
    """
    types: Types = {"x": f"*{dtype}", "weight": "*fp32", "logits": "*fp32", "rows": "i32"}
    constants: dict[str, Any] = {"EPSILON": epsilon, "D": hidden, "D_SLOTS": max(128, power_of_two(hidden))}
    constants |= {"OUTPUTS": ROUTER_OUTPUTS} | _chosen(experts, k or 1)
    optional(types, constants, biased, bias="*fp32")
    optional(types, constants, epsilon is not None, **typed(**{dtype: "y norm total normed"}))
    optional(types, constants, arranged, arranged=f"*{dtype}")
    optional(types, constants, k > 0, **typed(fp32="shares", i32="counter chosen pairs groups"))
    return Use("layers", "router", types, constants, num_warps=max(8, min(32, constants["D_SLOTS"] // 512)))


@cache
def best_token(count: int, dtype: str = "") -> Use:
    """The kernel of the best of `count` tokens. Without a type, of so many stripes' best tokens."""
    types = typed(fp32="largest logprob", i64="token") | {"logits": f"*{dtype or 'fp32'}"}
    constants: dict[str, Any] = {"COUNT": count, "STRIPE": min(TILE_TOKENS, power_of_two(count))}
    optional(types, constants, not dtype, tokens="*i64", logprobs="*fp32")
    return Use("layers", "best_token", types, constants, num_warps=4 if dtype else 1)
