"""Weights of linear layers and of experts: multiplied as they are stored where a kernel can. Otherwise those in four or
eight bits are widened, and torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from dflash_plugins import compiler, layers
from dflash_plugins import packed as ours
from dflash_plugins.kernel_specs import SHRUNK
from dflash_plugins.launch import TYPE_NAMES, Run
from dflash_plugins.packed import ROWS, PackedWeight, Packing, Tile
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor

from dflash_trt.engines.torch import kernels
from dflash_trt.engines.torch.layers import Cache, place_heads
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.formats.numbers import E2M1, E8M0

Attributes = Mapping[str, Any]
_OUTPUTS = 1 << 14  # of a weight that are compared at a time
_PROMPT = 512  # rows of a prompt's pass
_CACHE, _TIMED = 256 << 20, 9  # bytes that a GPU's cache does not hold, and calls that are timed


def weight(
    a: Attributes, codes: Tensor, scales: Tensor, second: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor | PackedWeight:
    """`Widened` (dflash_trt/graph/torch.py): as stored where a kernel multiplies it so, else in the dtype `to`."""
    dtype, layer, parts = to_torch_dtype(a["to"]), kernels.of(codes), [codes, scales, second, zeros]
    stack = codes.ndim == 3

    def wide(expert: int = 0) -> Tensor:
        tensors = [part[expert] if stack and part is not None else part for part in parts]
        return widened(a, *tensors).to(dtype)  # type: ignore[arg-type]

    if layer is not None and dtype != torch.float32 and not _has_nan(codes):
        packed = stored(a, codes, scales, second, zeros)
        if (tile := _tile(layer, packed, dtype, wide)) is not None:
            packed = replace(packed, tile=tile)
            _try_torch(layer, packed, dtype)
            return packed
    return torch.stack([wide(expert) for expert in range(len(codes))]) if stack else wide()


def plain(weight: Tensor) -> Tensor | PackedWeight:
    """A weight in the compute dtype, for our kernel if there is one: a row has the same bits beside any others."""
    if (layer := kernels.of(weight)) is None:
        return weight
    if weight.dtype == torch.float32:  # which tensor cores would round
        layer.missing.add("products in float32")
        return weight
    ready = ours.plain(weight)
    tile = _tile(layer, ready, weight.dtype, lambda _: weight)
    return weight if tile is None else replace(ready, tile=tile)


def _tile(
    layer: kernels.LayerKernels, packed: PackedWeight, dtype: torch.dtype, wide: Callable[[int], Tensor]
) -> Tile | None:
    """The tile with which a kernel multiplies a weight as it is stored, at any number of rows, because the order of a
    sum depends on it. The first weight of a form is tried on random rows against torch's product with the wide one; of
    a stack, its first and its last expert.
    """
    form, key = packed.form, (packed.form, dtype)

    def launched(run: Run, tile: Tile) -> Tile:
        tried, experts = replace(packed, tile=tile), sorted({0, max(form.experts, 1) - 1})
        dense = [wide(expert) for expert in experts]
        if form.codes != "plain" and not all(
            torch.equal(ours.widen(tried.one(i), dtype, run), dense[j]) for j, i in enumerate(experts)
        ):
            raise BuildError("it widens a weight to other numbers")
        most, longest = _random(max(ROWS[-1] * form.experts // 4, ROWS[-1]), packed, dtype), None
        for rows in tile.tokens[::-1]:
            # So many rows of each that a step has `rows`.
            count = max(rows * form.experts // 4, 1) if form.experts else rows
            x = most[:count].contiguous()
            # A head's weight would take gigabytes in float32.
            parts = [part for weight in dense for part in weight.split(_OUTPUTS)]
            exact = torch.cat([F.linear(x.float(), part.float()) for part in parts], 0 if form.experts else 1)
            if form.experts:
                chosen = torch.tensor(experts, device=x.device).repeat_interleave(count)
                _, _, order, groups = layers.route(F.one_hot(chosen, form.experts).float(), 1, run)
                y = ours.experts_product(x.repeat(len(experts), 1), tried, order, groups, run)
                of_each = y.view(len(experts), count, -1)
                longest = of_each if longest is None else longest
                if not torch.equal(of_each, longest[:, :count]):
                    raise BuildError("a row has other bits among other numbers of rows")
            else:
                # Formats that round inputs have a factor for each row.
                ones = torch.ones(rows, 1, device=x.device) if form.codes in ("e4m3", "e2m1") else None
                y = ours.product(x, tried, None, run, ones)
            error = (y - exact).abs().max() / exact.abs().max().clamp_min(torch.finfo(dtype).tiny)
            if not error <= 4 * torch.finfo(dtype).eps:
                raise BuildError(f"a product is off by {float(error):.1e} of the largest number")
        if not form.experts:
            _check_rows(tried, dtype, run)
        return tile

    if form.fits and key not in layer.packed:
        tiles = _fastest(layer.run, packed, dtype) if form.codes == "plain" else form.tiles
        layer.packed[key] = layer.first(
            "products" if form.codes == "plain" else "packed weights", launched, tiles
        )
    return layer.packed.get(key)


def _random(rows: int, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, weight.form.inputs, device=weight.codes.device).to(dtype)


def _check_rows(weight: PackedWeight, dtype: torch.dtype, run: Run) -> None:
    """Raise BuildError if a row's bits depend on how many there are: the instruction depends on it."""
    x = _random(2 * ROWS[-1], weight, dtype)
    longest = ours.product(x, weight, None, run)
    same = [ours.product(x[:rows].contiguous(), weight, None, run) for rows in (*weight.tile.tokens, 1)]
    if not all(torch.equal(y, longest[: len(y)]) for y in same):
        raise BuildError("a row has other bits among other numbers of rows")


def _fastest(run: Run, weight: PackedWeight, dtype: torch.dtype) -> list[Tile]:
    """The tiles by the time of a few rows, measured once on a GPU and kept, and then the last one."""
    *tiles, last = weight.form.tiles
    x = _random(ROWS[0], weight, dtype)

    def timed() -> list[int]:
        times = [_seconds(partial(ours.product, x, replace(weight, tile=tile), None, run)) for tile in tiles]
        return sorted(range(len(tiles)), key=times.__getitem__)

    if not x.is_cuda:
        return [*tiles, last]  # in the interpreter, no tile is fast
    what = [repr(weight.form), str(dtype), repr(tiles), torch.cuda.get_device_name()]
    order = compiler.kept("tiles", what, timed, lambda order: order, lambda order: order)
    return [*(tiles[i] for i in order), last]


def _seconds(call: Callable[[], object]) -> float:
    """The median time of a call on the GPU, which has nothing of it in its cache; infinite if it does not compile."""
    try:
        call()
    except (BuildError, EngineError):
        return float("inf")
    filling, times = torch.empty(_CACHE, dtype=torch.uint8, device="cuda"), list[float]()
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        filling.zero_()  # meanwhile the host launches what follows
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[_TIMED // 2]


def linear(
    a: Attributes, x: Tensor, packed: PackedWeight, bias: Tensor | None, factor: Tensor | None = None
) -> Tensor:
    """x [rows,in] -> [rows,out]. factor: float32 [rows,1], what sums are multiplied by. The many rows of a prompt are
    multiplied by torch if the weight has their dtype, or FP8: its tiles read the weight less often.
    """
    if a.get("prompt") and packed.form.codes == "plain" and len(x) > ROWS[-1]:
        return F.linear(x, packed.codes, bias)
    layer = kernels.of(x)
    assert layer is not None  # as the weight was loaded
    many = a.get("prompt") and len(x) > ROWS[-1]
    if many and factor is not None and layer.prompts.get((packed.form, x.dtype)):
        return _in_fp8(x, packed, bias, factor)
    return ours.product(x.contiguous(), packed, bias, layer.run, factor)


def product_heads(
    a: Attributes,
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    factor: Tensor | None,
    *heads: Any,
) -> list[Cache] | None:
    """`place_heads` of a product: one kernel for few rows, where it can be."""
    layer = kernels.of(x)
    if layer is not None and ours.joins_heads(len(x), packed, a["size"]):
        joined = partial(ours.by_product, x.contiguous(), packed, bias, factor)
        product = x.new_empty(len(x), packed.form.outputs)  # nothing is written there
        if (placed := place_heads(a, product, *heads, joined=joined)) is not None:
            return placed
    return place_heads(a, linear(a, x, packed, bias, factor), *heads)


def _in_fp8(x: Tensor, packed: PackedWeight, bias: Tensor | None, factor: Tensor) -> Tensor:
    """The product by torch's operator of FP8 numbers, with a scale for each row of x and of the weight."""
    assert packed.scales is not None
    codes = (x * (1 / SHRUNK["fp8"])).to(torch.float8_e4m3fn)
    weight = packed.codes.view(torch.float8_e4m3fn).t()
    scales = packed.scales.float().reshape(1, -1).expand(1, packed.form.outputs).contiguous()
    y = torch._scaled_mm(codes, weight, (factor * SHRUNK["fp8"]).contiguous(), scales, out_dtype=x.dtype)
    return y if bias is None else y + bias


def _try_torch(layer: kernels.LayerKernels, packed: PackedWeight, dtype: torch.dtype) -> None:
    """Find out whether `_in_fp8` takes this form, gives what our kernel gives, and is faster on this GPU. Once, as the
    first such weight is loaded: caches take the memory later.
    """
    form, key = packed.form, (packed.form, dtype)
    several = form.group or form.second or form.experts or form.scales not in ("fp32", "bf16", "fp16")
    if form.codes != "e4m3" or several or key in layer.prompts:
        return
    x, factor = _random(_PROMPT, packed, dtype), torch.ones(_PROMPT, 1, device=packed.codes.device)
    x = (x * 16).to(torch.float8_e4m3fn).to(dtype) * SHRUNK["fp8"]

    def theirs(rows: int = _PROMPT) -> Tensor:
        return _in_fp8(x[:rows], packed, None, factor[:rows])

    def mine(rows: int = _PROMPT) -> Tensor:
        return ours.product(x[:rows], packed, None, layer.run, factor[:rows])

    try:
        found = theirs(ROWS[-1])
    except (RuntimeError, NotImplementedError):  # not for this GPU, version, dtype or size
        layer.prompts[key] = False
        return
    wanted = mine(ROWS[-1])
    agree = bool((found - wanted).abs().max() <= 2**-6 * wanted.abs().max())
    if agree and x.is_cuda:  # in the interpreter, no kernel is fast
        what = [repr(key), torch.__version__, torch.cuda.get_device_name()]
        agree = compiler.kept("prompts", what, lambda: _seconds(theirs) < _seconds(mine), bool, bool)
    layer.prompts[key] = agree


def scaled_product(
    a: Attributes, x: Tensor, weight: Tensor | PackedWeight, factor: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`ScaledProduct` (dflash_trt/graph/torch.py)."""
    if isinstance(weight, PackedWeight):
        return linear(a, x, weight, bias, factor)
    y = (F.linear(x, weight).float() * factor).to(x.dtype)
    return y if bias is None else y + bias


def stored(
    a: Attributes,
    codes: Tensor,
    scales: Tensor,
    second: Tensor | None = None,
    zeros: Tensor | None = None,
) -> PackedWeight:
    """A weight for the kernels, or a stack of them, from the inputs of `Widened`."""
    rows, columns = codes.shape[-2], a["columns"]
    experts = len(codes) if codes.ndim == 3 else 0
    kind = {torch.float8_e4m3fn: "e4m3", torch.uint8: "e8m0"}.get(scales.dtype) or TYPE_NAMES[scales.dtype]
    group, group_rows = _groups(a, scales[0] if experts else scales, columns)
    form = Packing(
        rows,
        columns,
        codes=a["codes"],
        scales=kind,
        group=group,
        group_rows=group_rows,
        second="" if second is None else "over" if a["reciprocal"] else "times",
        zeros=zeros is not None,
        experts=experts,
    )
    return PackedWeight(
        form,
        codes.view(torch.uint8).contiguous(),
        (scales.view(torch.uint8) if scales.itemsize == 1 else scales).contiguous(),
        None if second is None else second.float().reshape(*codes.shape[:-2], 1),
        None if zeros is None else zeros.float().contiguous(),
        ours.counters_of(rows, codes.device),
        form.tiles[0],
    )


def widened(
    a: Attributes, codes: Tensor, scales: Tensor, second: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor:
    """float32 [out,in]: numbers times the factors of their groups, plus what a zero point adds to each number."""
    columns = a["columns"]
    numbers = _numbers(a["codes"], codes)
    factors = _table(E8M0, scales) if scales.dtype == torch.uint8 else scales.float()
    if second is not None:
        factors = factors / second.float() if a["reciprocal"] else factors * second.float()
    group, group_rows = _groups(a, scales, columns)
    factors = (
        factors.reshape(1, 1) if not group_rows else factors.reshape(-1, -(-columns // (group or columns)))
    )
    if group_rows > 1:
        factors = factors.repeat_interleave(group_rows, 0)[: len(numbers)]
    if group and columns % group:
        return numbers.mul_(factors.repeat_interleave(group, 1)[:, :columns])
    by_group = numbers.unflatten(1, (-1, group or columns))
    by_group.mul_(factors[..., None])
    if zeros is not None:
        by_group.add_(zeros.float()[..., None])
    return numbers


def _groups(a: Attributes, scales: Tensor, columns: int) -> tuple[int, int]:
    """Columns and rows that share a scale; 0: all of them."""
    if scales.numel() == 1:
        return 0, 0
    size = a["group_size"]
    return (size, a["group_rows"]) if size and size < columns else (0, a["group_rows"] if size else 1)


def _numbers(kind: str, codes: Tensor) -> Tensor:
    """float32 [out,in], of its own memory."""
    if kind in ("int8", "e4m3"):
        return codes.to(torch.float32)
    low, high = codes & 15, codes >> 4
    both = torch.stack((low, high), -1).flatten(1)
    if kind == "e2m1":
        return _table(E2M1, both)
    return (both.view(torch.int8).bitwise_xor_(8) - 8).float()


def _table(values: Any, codes: Tensor) -> Tensor:
    return torch.from_numpy(values).to(codes.device)[codes.int()]


def _has_nan(codes: Tensor) -> bool:
    """Whether codes stand for no number, which the kernels would take for one."""
    if codes.dtype != torch.float8_e4m3fn:
        return False
    return bool(((codes.view(torch.uint8) & 127) == 127).any())
