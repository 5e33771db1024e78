"""Our Triton kernels in the layers of a graph: each is compiled as it is first launched, or left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from dflash_plugins import attention, compiled, launch, layers, moe, packed
from dflash_plugins import kernel_specs as uses

from dflash_trt.engines.device import kernels as device
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.logs import warn_once

Tensor = torch.Tensor
T = TypeVar("T")
Made = TypeVar("Made")
_log = logging.getLogger(__name__)
# Passes of more rows of a sequence are of a prompt, and have tiles of their own. Verification has one tile at every
# length, because the order of a sum depends on it.
_VERIFIED_ROWS = 64


class LayerKernels:
    """Kernels on one GPU. A method returns None if torch's operators have to do: with float32, which tensor cores would
    round, and where no tile compiles.
    """

    def __init__(self, run: launch.Run) -> None:
        self._run = run
        self._tiles: dict[Any, Any] = {}  # the first one that compiles, by kind of layer; None: none does

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        first: Tensor,
        last: Tensor,
        start: Tensor | None,
        visible: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        *,
        by_row: bool = False,
    ) -> Tensor | None:
        """q [B,H,S,d] over caches [B,N,C,d], as dflash_trt/graph/torch.py describes `Attend`."""
        if q.dtype == torch.float32:
            return None
        size, long = q.shape[3], q.shape[2] > _VERIFIED_ROWS
        if abs(scale * size**0.5 - 1) > 1e-6:  # the kernel's own is d ** -0.5
            q = (q.float() * (scale * size**0.5)).to(q.dtype)
        given: list[Tensor] = [x.contiguous() for x in (q, k, v, first, last)]

        def launched(tile: uses.AttentionTile) -> Tensor:
            return attention.attention(
                *given, start=start, visible=visible, sinks=sinks, tile=tile, by_row=by_row, run=self._run
            )

        tiles = uses.attention_tiles(size)
        order = tiles[3:] + tiles[2::-1] if long else tiles[1:2] + tiles[:1] + tiles[2:]
        key = "attention", size, k.shape[1], q.shape[1], q.dtype, visible is not None, sinks is not None, long
        return self._first(key, "attention", order, launched)

    def experts(self, x: Tensor, router: Tensor, weights: Sequence[Any], a: Any) -> Tensor | None:
        """`dflash::MoE` with MXFP4 weights."""
        if x.dtype == torch.float32:
            return None
        layer = moe.PackedExperts(*weights, *(a[name] for name in ("k", "alpha", "beta", "limit")))
        long = len(x) > 4 * _VERIFIED_ROWS

        def launched(tile: uses.Tile) -> Tensor:
            return moe.moe(x.contiguous(), router.contiguous(), layer, tile, self._run)

        order = uses.TILES[::-1] if long else uses.TILES
        key = "experts", layer.gate_up.shape, layer.k, x.dtype, layer.gate_up_bias is not None, long
        return self._first(key, "experts", order, launched)

    def delta_net(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """`dflash::GatedDeltaNet`."""
        given = [each.contiguous() for each in inputs]
        v, state = given[2], given[4]

        def launched(_: None) -> tuple[Tensor, Tensor, Tensor]:
            return launch.gated_delta_net(*given, run=self._run)

        return self._first(("delta", state.shape[1:], v.shape[2]), "Gated DeltaNet", [None], launched)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor] | None:
        """x + y and its norm, [rows,D]."""

        def launched(_: None) -> tuple[Tensor, Tensor]:
            return layers.add_norm(x.contiguous(), y.contiguous(), weight, epsilon, run=self._run)

        return self._first(("norm", x.shape[1], epsilon, x.dtype), "norms", [None], launched)

    def place_heads(
        self,
        x: Tensor,
        count: int,
        size: int,
        heads: int,
        epsilon: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        start: Tensor | None,
        k_cache: Tensor | None,
        v_cache: Tensor | None,
    ) -> Tensor | None:
        """`PlaceHeads`. An empty tensor if there are no queries."""
        given = {"q_norm": q_norm, "k_norm": k_norm, "cos": cos, "sin": sin}
        given |= {"k_cache": k_cache, "v_cache": v_cache}
        if any(each is not None and each.dtype != x.dtype for each in given.values()):
            return None

        def launched(_: None) -> Tensor:
            contiguous = {n: None if each is None else each.contiguous() for n, each in given.items()}
            rows = x.contiguous()
            q = layers.place_heads(
                rows, count, size, heads, start=start, epsilon=epsilon, run=self._run, **contiguous
            )
            return rows[:0] if q is None else q

        there = tuple(name for name, each in given.items() if each is not None)
        key = "heads", heads, x.shape[1], size, epsilon, x.dtype, there
        return self._first(key, "heads", [None], launched)

    def gate(self, x: Tensor) -> Tensor | None:
        """Gated activation of x [rows, 2 * inner]."""
        key = "gate", x.shape[1], x.dtype
        return self._first(key, "gates", [None], lambda _: layers.gate(x.contiguous(), run=self._run))

    def router(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """A router's product in float32."""

        def launched(_: None) -> Tensor:
            return layers.router(x.contiguous(), weight, bias, run=self._run)

        return self._first(("router", weight.shape, bias is None, x.dtype), "routers", [None], launched)

    def multiplies(
        self, weight: packed.PackedWeight, dtype: torch.dtype, widened: Callable[[], Tensor]
    ) -> bool:
        """Whether a kernel multiplies a weight as it is stored. The first weight of a form is tried on random rows
        against torch's product with the `widened` one. The tile that is found here is that of any number of rows,
        because the order of a sum depends on it.
        """
        key = "packed", weight.form, dtype
        if not weight.form.fits or key in self._tiles:
            return self._tiles.get(key) is not None

        def launched(tile: packed.Tile) -> Tensor:
            dense = widened()
            if not torch.equal(packed.widen(weight, dtype, tile, self._run), dense):
                raise BuildError("it widens a weight to other numbers")
            for rows in packed.ROWS[::-1]:
                x = torch.randn(rows, weight.form.inputs, device=dense.device).to(dtype)
                y, exact = (
                    packed.product(x, weight, None, tile, self._run),
                    F.linear(x.float(), dense.float()),
                )
                error = (y - exact).abs().max() / exact.abs().max().clamp_min(torch.finfo(dtype).tiny)
                if not error <= 4 * torch.finfo(dtype).eps:
                    raise BuildError(f"a product is off by {float(error):.1e} of the largest number")
            return y

        tiles = packed.TILES[weight.form.in_word]
        return self._first(key, "packed weights", tiles, launched) is not None

    def packed_linear(self, x: Tensor, weight: packed.PackedWeight, bias: Tensor | None) -> Tensor:
        """x [rows,in], few rows, through a layer with a weight that `multiplies` allowed."""
        (tile,) = self._tiles["packed", weight.form, x.dtype]
        return packed.product(x.contiguous(), weight, bias, tile, self._run)

    def widened(self, weight: packed.PackedWeight, dtype: torch.dtype) -> Tensor:
        """The weight [out,in] in this dtype."""
        (tile,) = self._tiles["packed", weight.form, dtype]
        return packed.widen(weight, dtype, tile, self._run)

    def _first(self, key: Any, what: str, tiles: Iterable[T], launched: Callable[[T], Made]) -> Made | None:
        """A launch with the first of these tiles that compiles and fits, which then stays the one."""
        if key in self._tiles:
            found = self._tiles[key]
            return None if found is None else launched(*found)
        problems = []
        for tile in tiles:
            try:
                made = launched(tile)
            except (BuildError, EngineError) as error:
                problems.append(str(error))
                continue
            self._tiles[key] = (tile,)
            return made
        self._tiles[key] = None
        warn_once(
            _log, f"no kernel of ours for {what} on this GPU: {problems[0]}. torch's operators take its place"
        )
        return None


def of(x: Tensor) -> LayerKernels | None:
    """The kernels for this tensor's device; None on a CPU, and where no kernel can be compiled."""
    return _of_this_gpu() if x.is_cuda else None


@cache
def _of_this_gpu() -> LayerKernels | None:
    try:
        if (reason := compiled.trial()) is not None:
            raise BuildError(reason)
        return LayerKernels(device.kernels_here({}))
    except (BuildError, EngineError) as error:
        warn_once(_log, f"{error}; torch's operators take the place of all kernels")
        return None
