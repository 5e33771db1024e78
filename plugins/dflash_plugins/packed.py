"""Products with weights as they are stored: the kernels of kernels/packed.py, and their launches on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.kernel_specs import Types, Use, optional, power_of_two
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton


@dataclass(frozen=True)
class Packing:
    """How a weight [outputs, inputs] is stored: see kernels/packed.py."""

    outputs: int
    inputs: int
    codes: str  # int4 and e2m1, two in a byte; int8 and e4m3; "plain" numbers of the compute type, without scales
    scales: str = ""  # fp32, bf16, fp16, e4m3, or e8m0
    group: int = 0  # columns that share a scale; 0: all of a row do
    group_rows: int = 1  # rows that share it, too; 0: all do
    second: str = ""  # what the scale of the whole weight does with the others: "times", "over"
    zeros: bool = False
    experts: int = 0  # weights in a stack; 0: it is one weight

    @property
    def in_word(self) -> int:
        """Codes of 16 bits."""
        return {"plain": 1, "int4": 4, "e2m1": 4}.get(self.codes, 2)

    @property
    def fits(self) -> bool:
        """Whether the kernels take it: a step has whole groups, or a group has whole steps."""
        step = self.tiles[0].block_k
        whole = not self.group or not (step % self.group and self.group % step)
        return whole and not self.inputs % self.in_word

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The first one that compiles is taken. The largest one leaves too few registers to scales of two levels."""
        return TILES[self.in_word][1 if self.second else 0 :]

    def exact(self, dtype: str) -> bool:
        """Whether the factor of every number is one of this type."""
        alone = not self.second and not self.zeros and self.codes != "int8" and dtype != "fp32"
        return alone and (self.scales == dtype or (self.scales, dtype) == ("e8m0", "bf16"))


ROWS = (16, 32, 64)  # tokens of a program


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a product: outputs and inputs of a step, warps, pipeline stages, and the tokens of a program, of
    which the fewest that hold the rows of a pass are taken.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    tokens: tuple[int, ...] = ROWS

    def tokens_of(self, rows: int) -> int:
        """The tokens of a program in a pass of so many rows."""
        return next((count for count in self.tokens if count >= rows), self.tokens[-1])


# By the codes of a word. In a step, each row of a packed weight is 64 bytes. The last ones have one instruction at any
# number of rows, for a GPU on which those of 16, 32 and 64 columns add in other orders (none is known).
TILES = {
    4: (Tile(128, 128, 4, 3), Tile(64, 128, 4, 4), Tile(64, 128, 4, 2), Tile(64, 128, 4, 2, ROWS[-1:])),
    2: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, ROWS[-1:])),
    1: (
        *(Tile(64, 64, 4, stages, (16, 64)) for stages in (3, 4, 2)),
        Tile(128, 64, 4, 2, (16, 64)),
        Tile(64, 64, 4, 2, ROWS[-1:]),
    ),
}
# Programs that keep the memory of 132 to 188 multiprocessors busy, and inputs of each at least.
PROGRAMS, SPAN = 512, 512
# Of more rows, so many are multiplied at a time, which bounds the memory of their parts.
MOST_ROWS = 1024


@cache
def splits_of(weight: Packing, tile: Tile) -> tuple[int, int]:
    """The parts of a weight's inputs that programs add up, and the inputs of each. Those of experts are whole."""
    stripes = -(-weight.outputs // tile.block_n)
    parts = 1 if weight.experts else max(1, min(PROGRAMS // stripes, weight.inputs // SPAN))
    span = -(-weight.inputs // (parts * tile.block_k)) * tile.block_k
    return -(-weight.inputs // span), span


@cache
def product_use(
    weight: Packing, dtype: str, tokens: int, tile: Tile, *, biased: bool, scaled: bool = False
) -> Use:
    """The product of rows, `tokens` of them in a program, with a weight. `scaled`: each row is multiplied after."""
    types, constants = _stored(weight, dtype, tile)
    splits, span = splits_of(weight, tile)
    types |= {"x": f"*{dtype}", "rows": "i32", "y": f"*{dtype}"}
    constants |= {"SPLITS": splits, "SPAN": span, "TOKENS": tokens, "EXACT": weight.exact(dtype)}
    optional(types, constants, biased, bias=f"*{dtype}")
    optional(types, constants, scaled, factor="*fp32")
    optional(types, constants, splits > 1, partial="*fp32", counters="*i32")
    optional(types, constants, weight.experts > 0, order="*i32", groups="*i32")
    return Use("packed", "product", types, constants, tile.num_warps, tile.num_stages)


@cache
def heads_use(
    weight: Packing, dtype: str, tokens: int, tile: Tile, heads: Use, *, biased: bool, scaled: bool = False
) -> Use:
    """The product of rows, with what `heads` (kernel_specs.place_heads) does with it."""
    first = product_use(weight, dtype, tokens, tile, biased=biased, scaled=scaled)
    types = first.types | heads.types | {"partial": "*fp32", "counters": "*i32"}
    types.pop("y")
    left = types.keys() | {"order", "groups"}
    constants = {name: value for name, value in first.constants.items() if name not in left}
    # More rows of a head at a time would take registers from the product of many.
    constants |= heads.constants | {"AHEAD": 16 if tokens == ROWS[0] else 8}
    return Use("packed", "product_heads", types, constants, tile.num_warps, tile.num_stages)


@cache
def widen_use(weight: Packing, dtype: str, tile: Tile) -> Use:
    """The kernel that writes a packed weight in another type."""
    types, constants = _stored(weight, dtype, tile)
    constants["EXACT"] = weight.exact(dtype)
    return Use("packed", "widen", types | {"y": f"*{dtype}"}, constants)


def _stored(weight: Packing, dtype: str, tile: Tile) -> tuple[Types, dict[str, Any]]:
    types: Types = {"codes": f"*{dtype}" if weight.codes == "plain" else "*u8"}
    constants: dict[str, Any] = {"OUT": weight.outputs, "IN": weight.inputs, "PER": weight.in_word}
    constants |= {"CODES": weight.codes, "SCALES": weight.scales, "SECOND": weight.second}
    # One group is one of any size.
    constants |= {"GROUP": weight.group or 1 << 30, "GROUP_ROWS": weight.group_rows or 1 << 30}
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    scales = "u8" if weight.scales in ("e4m3", "e8m0") else weight.scales
    optional(types, constants, bool(scales), scales=f"*{scales}")
    optional(types, constants, bool(weight.second), second="*fp32")
    optional(types, constants, weight.zeros, zeros="*fp32")
    return types, constants


@dataclass(frozen=True)
class PackedWeight:
    """A weight [outputs, inputs] as it is stored; tensors are contiguous. Scales of one byte are uint8. All but the
    counters of a stack have an axis of experts in front. Products of one weight do not overlap.
    """

    form: Packing
    codes: Tensor  # bytes [outputs, inputs / 2] or [outputs, inputs]; numbers of the compute type
    scales: Tensor | None
    second: Tensor | None  # float32 [1]
    zeros: Tensor | None  # float32 [outputs, groups]
    counters: Tensor | None  # int32 zeros; None of a stack
    tile: Tile

    @property
    def stored(self) -> dict[str, Tensor | None]:
        """The weight's own tensors, as arguments of the kernels."""
        return {"codes": self.codes, "scales": self.scales, "second": self.second, "zeros": self.zeros}

    def one(self, expert: int) -> PackedWeight:
        """The weight of an expert, copied from the stack to addresses that kernels take; itself if it is no stack."""
        if not self.form.experts:
            return self
        tensors: dict[str, Any] = {n: t if t is None else t[expert].clone() for n, t in self.stored.items()}
        return replace(self, form=replace(self.form, experts=0), **tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.stored.values() if t is not None)


def counters_of(outputs: int, device: torch.device) -> Tensor:
    """Those of a weight: one for each stripe of outputs and piece of rows."""
    count = -(-outputs // 64) * (MOST_ROWS // ROWS[-1])
    return torch.zeros(count, dtype=torch.int32, device=device)


def plain(weight: Tensor, tile: Tile | None = None) -> PackedWeight:
    """A weight [outputs, inputs], or a stack of them, bfloat16 or float16. tile: by default the first one."""
    outputs, inputs = weight.shape[-2:]
    form = Packing(outputs, inputs, "plain", experts=len(weight) if weight.ndim == 3 else 0)
    counters = None if form.experts else counters_of(form.outputs, weight.device)
    return PackedWeight(form, weight, None, None, None, counters, tile or form.tiles[0])


def joins_heads(rows: int, weight: PackedWeight, size: int) -> bool:
    """Whether the product of so many rows may place its heads of so many numbers (`by_product`)."""
    whole = size == power_of_two(size) and not size % weight.tile.block_n
    return whole and rows <= ROWS[-1] and not weight.form.experts


def by_product(x: Tensor, weight: PackedWeight, bias: Tensor | None, factor: Tensor | None, run: Run) -> Run:
    """A launch of `place_heads` (layers.py), whose x is the product of these and is not read: one kernel does both."""
    rows, form, tile = len(x), weight.form, weight.tile
    tokens, splits = tile.tokens_of(rows), splits_of(form, tile)[0]

    def launched(heads: Use, _: tuple[int, ...], **arguments: Any) -> None:
        partial = torch.empty(splits, rows, form.outputs, dtype=torch.float32, device=x.device)
        arguments |= weight.stored | {"x": x, "bias": bias, "factor": factor, "rows": rows}
        more = {"biased": bias is not None, "scaled": factor is not None}
        use = heads_use(form, TYPE_NAMES[x.dtype], tokens, tile, heads, **more)
        grid = -(-rows // tokens) * -(-form.outputs // tile.block_n), splits
        run(use, grid, **arguments, partial=partial, counters=weight.counters)

    return launched


def product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    run: Run = by_triton,
    factor: Tensor | None = None,
) -> Tensor:
    """x [rows, inputs] bfloat16 or float16 -> [rows, outputs], all contiguous. A row's bits depend on it alone. factor:
    float32 [rows, 1], what its sums are multiplied by before the bias is added.
    """
    form, tile, y = weight.form, weight.tile, x.new_empty(len(x), weight.form.outputs)
    splits, _ = splits_of(form, tile)
    for begin in range(0, len(x), MOST_ROWS):
        part, out = x[begin : begin + MOST_ROWS], y[begin : begin + MOST_ROWS]
        rows = len(part)
        tokens, arguments = tile.tokens_of(rows), {"bias": bias}
        arguments["factor"] = None if factor is None else factor[begin : begin + MOST_ROWS]
        if splits > 1:
            arguments["partial"] = torch.empty(
                splits, rows, form.outputs, dtype=torch.float32, device=x.device
            )
            arguments["counters"] = weight.counters
        more = {"biased": bias is not None, "scaled": factor is not None}
        use = product_use(form, TYPE_NAMES[x.dtype], tokens, tile, **more)
        grid = -(-rows // tokens) * -(-form.outputs // tile.block_n), splits
        run(use, grid, x=part, **weight.stored, **arguments, rows=rows, y=out)
    return y


def experts_product(
    x: Tensor, weight: PackedWeight, order: Tensor, groups: Tensor, run: Run = by_triton
) -> Tensor:
    """x [rows, inputs], each row by its own expert's weight -> [rows, outputs]. order, groups: see `layers.route`."""
    form, tile = weight.form, weight.tile
    tokens = tile.tokens_of(-(-2 * len(x) // form.experts))  # most experts have theirs in one step
    y = x.new_empty(len(x), form.outputs)
    arguments = {"rows": len(x), "order": order, "groups": groups}
    use = product_use(form, TYPE_NAMES[x.dtype], tokens, tile, biased=False)
    run(use, (-(-form.outputs // tile.block_n), len(groups)), x=x, **weight.stored, **arguments, y=y)
    return y


def widen(weight: PackedWeight, dtype: torch.dtype, run: Run = by_triton) -> Tensor:
    """The weight [outputs, inputs] in another type."""
    form, tile = weight.form, weight.tile
    y = torch.empty(form.outputs, form.inputs, dtype=dtype, device=weight.codes.device)
    grid = -(-form.outputs // tile.block_n), -(-form.inputs // tile.block_k)
    run(widen_use(form, TYPE_NAMES[dtype], tile), grid, **weight.stored, y=y)
    return y
