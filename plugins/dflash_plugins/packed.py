"""Products with weights as they are stored: the kernels of kernels/packed.py, and their launches on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dflash_plugins.kernel_specs import Types, Use, optional
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton


@dataclass(frozen=True)
class Packing:
    """How a weight [outputs, inputs] is stored: see kernels/packed.py."""

    outputs: int
    inputs: int
    codes: str  # int4 and e2m1, two in a byte; int8 and e4m3
    scales: str  # fp32, bf16, fp16, e4m3, or e8m0
    group: int = 0  # columns that share a scale; 0: all of a row do
    group_rows: int = 1  # rows that share it, too; 0: all do
    second: str = ""  # what the scale of the whole weight does with the others: "times", "over"
    zeros: bool = False
    experts: int = 0  # weights in a stack; 0: it is one weight

    @property
    def in_word(self) -> int:
        """Codes of 16 bits."""
        return 4 if self.codes in ("int4", "e2m1") else 2

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


@dataclass(frozen=True)
class Tile:
    """Tile sizes of a product with a packed weight: outputs and inputs of a step, warps, pipeline stages."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By the codes of a word. In a step, each row of a weight is 64 bytes.
TILES = {
    4: (Tile(128, 128, 4, 3), Tile(64, 128, 4, 4), Tile(64, 128, 4, 2)),
    2: (Tile(128, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 64, 4, 2)),
}
PLAIN_TILES = tuple(Tile(64, 64, 4, stages) for stages in (4, 3, 2))  # of weights in the compute type
ROWS = (16, 32, 64)  # tokens of a program
# Programs that keep the memory of 132 to 188 multiprocessors busy, and inputs of each at least.
PROGRAMS, SPAN = 512, 512


@cache
def splits_of(weight: Packing, tile: Tile) -> tuple[int, int]:
    """The parts of a weight's inputs that programs add up, and the inputs of each. Those of experts are whole."""
    stripes = -(-weight.outputs // tile.block_n)
    parts = 1 if weight.experts else max(1, min(PROGRAMS // stripes, weight.inputs // SPAN))
    span = -(-weight.inputs // (parts * tile.block_k)) * tile.block_k
    return -(-weight.inputs // span), span


@cache
def product_use(weight: Packing, dtype: str, tokens: int, tile: Tile, *, biased: bool) -> Use:
    """The product of up to `tokens` rows with a packed weight."""
    types, constants = _packed(weight, tile)
    splits, span = splits_of(weight, tile)
    types |= {"x": f"*{dtype}", "rows": "i32", "y": f"*{dtype}"}
    constants |= {"SPLITS": splits, "SPAN": span, "TOKENS": tokens, "EXACT": weight.exact(dtype)}
    optional(types, constants, biased, bias=f"*{dtype}")
    optional(types, constants, splits > 1, partial="*fp32", counters="*i32")
    optional(types, constants, weight.experts > 0, order="*i32", groups="*i32")
    return Use("packed", "packed_product", types, constants, tile.num_warps, tile.num_stages)


@cache
def plain_use(outputs: int, inputs: int, dtype: str, tokens: int, tile: Tile) -> Use:
    """The product of rows with the weights of their experts, in one type, `tokens` at a time."""
    types: Types = {
        "x": f"*{dtype}",
        "weight": f"*{dtype}",
        "order": "*i32",
        "groups": "*i32",
        "y": f"*{dtype}",
    }
    constants = {
        "OUT": outputs,
        "IN": inputs,
        "TOKENS": tokens,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    return Use("packed", "plain_product", types, constants, tile.num_warps, tile.num_stages)


@cache
def widen_use(weight: Packing, dtype: str, tile: Tile) -> Use:
    """The kernel that writes a packed weight in another type."""
    types, constants = _packed(weight, tile)
    constants["EXACT"] = weight.exact(dtype)
    return Use("packed", "widen", types | {"y": f"*{dtype}"}, constants)


def _packed(weight: Packing, tile: Tile) -> tuple[Types, dict[str, Any]]:
    types: Types = {
        "codes": "*u8",
        "scales": f"*{'u8' if weight.scales in ('e4m3', 'e8m0') else weight.scales}",
    }
    constants: dict[str, Any] = {"OUT": weight.outputs, "IN": weight.inputs, "PER": weight.in_word}
    constants |= {"CODES": weight.codes, "SCALES": weight.scales, "SECOND": weight.second}
    # One group is one of any size.
    constants |= {"GROUP": weight.group or 1 << 30, "GROUP_ROWS": weight.group_rows or 1 << 30}
    constants |= {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    optional(types, constants, bool(weight.second), second="*fp32")
    optional(types, constants, weight.zeros, zeros="*fp32")
    return types, constants


@dataclass(frozen=True)
class PackedWeight:
    """A weight [outputs, inputs] as it is stored; tensors are contiguous. Scales of one byte are uint8. All but the
    counters of a stack have an axis of experts in front.
    """

    form: Packing
    codes: Tensor  # bytes [outputs, inputs / 2] or [outputs, inputs]
    scales: Tensor
    second: Tensor | None  # float32 [1]
    zeros: Tensor | None  # float32 [outputs, groups]
    counters: Tensor  # int32 zeros, one for each 16 outputs; products of one weight do not overlap
    tile: Tile

    @property
    def stored(self) -> dict[str, Tensor | None]:
        """The weight's own tensors, as arguments of the kernels."""
        return {"codes": self.codes, "scales": self.scales, "second": self.second, "zeros": self.zeros}

    def one(self, expert: int) -> PackedWeight:
        """The weight of an expert, copied from the stack to addresses that kernels take; itself if it is no stack."""
        if not self.form.experts:
            return self
        own: dict[str, Any] = {n: t if t is None else t[expert].clone() for n, t in self.stored.items()}
        return replace(self, form=replace(self.form, experts=0), **own)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.stored.values() if t is not None)


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None, run: Run = by_triton) -> Tensor:
    """x [rows, inputs] bfloat16 or float16, up to 64 rows -> [rows, outputs], all contiguous."""
    rows, form, tile = len(x), weight.form, weight.tile
    tokens = next(count for count in ROWS if count >= rows)
    y = x.new_empty(rows, form.outputs)
    splits, _ = splits_of(form, tile)
    given = {"bias": bias}
    if splits > 1:
        given["partial"] = torch.empty(splits, rows, form.outputs, dtype=torch.float32, device=x.device)
        given["counters"] = weight.counters
    use = product_use(form, TYPE_NAMES[x.dtype], tokens, tile, biased=bias is not None)
    grid = -(-form.outputs // tile.block_n), splits
    run(use, grid, x=x, **weight.stored, **given, rows=rows, y=y)
    return y


def experts_product(
    x: Tensor, weight: PackedWeight, order: Tensor, groups: Tensor, run: Run = by_triton
) -> Tensor:
    """x [rows, inputs], each row by its own expert's weight -> [rows, outputs]. order, groups: see `layers.route`."""
    form, tile = weight.form, weight.tile
    tokens = in_step(len(x), form.experts)
    y = x.new_empty(len(x), form.outputs)
    given = {"rows": len(x), "order": order, "groups": groups}
    use = product_use(form, TYPE_NAMES[x.dtype], tokens, tile, biased=False)
    run(use, (-(-form.outputs // tile.block_n), len(groups)), x=x, **weight.stored, **given, y=y)
    return y


def plain_product(
    x: Tensor, weight: Tensor, order: Tensor, groups: Tensor, tile: Tile, run: Run = by_triton
) -> Tensor:
    """`experts_product` with weights [experts, outputs, inputs] of x's type, bfloat16 or float16."""
    experts, outputs, inputs = weight.shape
    y = x.new_empty(len(x), outputs)
    use = plain_use(outputs, inputs, TYPE_NAMES[x.dtype], in_step(len(x), experts), tile)
    grid = -(-outputs // tile.block_n), len(groups)
    run(use, grid, x=x, weight=weight, order=order, groups=groups, y=y)
    return y


def in_step(rows: int, experts: int) -> int:
    """Rows of a step: most experts have theirs in one. Their number changes no bit of them."""
    return next((count for count in ROWS if count * experts >= 2 * rows), ROWS[-1])


def widen(weight: PackedWeight, dtype: torch.dtype, run: Run = by_triton) -> Tensor:
    """The weight [outputs, inputs] in another type."""
    form, tile = weight.form, weight.tile
    y = torch.empty(form.outputs, form.inputs, dtype=dtype, device=weight.codes.device)
    grid = -(-form.outputs // tile.block_n), -(-form.inputs // tile.block_k)
    run(widen_use(form, TYPE_NAMES[dtype], tile), grid, **weight.stored, y=y)
    return y
