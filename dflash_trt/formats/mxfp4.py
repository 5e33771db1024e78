"""MXFP4: E2M1 numbers in blocks of 32 with one power of two each. Weights only.

Source: OCP Microscaling Formats v1.0. gpt-oss stores its experts as blocks [E,O,G,16] and exponents [E,O,G].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from . import bodies
from .base import BLOCK, Algorithm, Floats, Form, NumberFormat, Shape
from .numbers import BYTE_TO_PAIR, E2M1, E2M1_MAX, E8M0, encode_e2m1, pack_pairs, unpack_pairs

if TYPE_CHECKING:
    from dflash_trt.checkpoint.linears import StoredLinear
    from dflash_trt.graph.builder import GraphBuilder
    from dflash_trt.graph.quantized import LinearKind

_MXFP4 = Algorithm("W4A16_MXFP4", "mxfp4", group_size=BLOCK)


def quantize_mxfp4(w: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """[out, in] -> bytes [out, in/2] and exponents [out, in/32] + 127.

    Two powers of two are tried per block: the smallest that clips nothing, and the one below. The one with the
    smaller squared error is used.
    """
    blocks = w.reshape(w.shape[0], -1, BLOCK)
    # frexp: largest / 6 is in [0.5, 1) * 2**exponent. Exactly 0.5 needs an exponent one lower.
    mantissa, exponent = np.frexp(np.abs(blocks).max(axis=-1) / np.float32(E2M1_MAX))
    safe = np.clip(exponent - (mantissa == 0.5), -127, 127)
    tried = []
    for exponents in (safe, np.maximum(safe - 1, -127)):
        scale = np.ldexp(np.float32(1), exponents)[..., None]
        codes = encode_e2m1(blocks / scale)
        error = np.square(E2M1[codes] * scale - blocks, dtype=np.float64).sum(axis=-1)
        tried.append((codes, exponents, error))
    (codes, exponents, error), (tighter, lower, less) = tried
    better = less < error
    codes = np.where(better[..., None], tighter, codes).reshape(w.shape)
    return pack_pairs(codes), (np.where(better, lower, exponents) + 127).astype(np.uint8)


def dequantize_mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Floats:
    numbers = E2M1[unpack_pairs(packed)].reshape(packed.shape[0], -1, BLOCK)
    return (numbers * E8M0[scales][..., None]).reshape(packed.shape[0], -1)


def unpack_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Floats:
    """uint8 [..., G, 16] and [..., G] -> float32 [..., G*32]."""
    numbers: Floats = BYTE_TO_PAIR[blocks].reshape(*blocks.shape[:-1], BLOCK) * E8M0[scales][..., None]
    return numbers.reshape(*blocks.shape[:-2], -1)


class MXFP4(NumberFormat):
    name = "mxfp4"
    algorithms = (_MXFP4, Algorithm("MXFP4", "mxfp4", group_size=BLOCK))
    group_sizes = (BLOCK,)
    integer_bits = 8
    capabilities = (100, 103, 110, 120, 121)  # seen with TensorRT-RTX 1.7

    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        return {
            "weight": Form([(rows, columns // 2)], ["U8"]),
            "weight_scale": Form([(rows, columns // BLOCK)], ["U8"]),
        }

    def widen(
        self, codes: NDArray[Any], scale: NDArray[Any], global_scale: NDArray[Any] | None, *, by_row: bool
    ) -> Floats:
        return dequantize_mxfp4(codes, scale)

    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        return round(parameters * (0.5 + 1 / BLOCK))

    def algorithm(self, *, calibrated: bool, inputs: Sequence[int]) -> Algorithm:
        return _MXFP4

    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        return {"weight": ("U8", (rows, columns // 2)), "weight_scale": ("U8", (rows, columns // BLOCK))}

    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        codes, scales = quantize_mxfp4(rows)
        return {"weight": codes, "weight_scale": scales}

    def integers(
        self, codes: NDArray[Any], scale: NDArray[Any], *, by_row: bool
    ) -> tuple[NDArray[np.int8], Floats]:
        """Twice the numbers, which are whole: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives."""
        return (2 * E2M1[unpack_pairs(codes)]).astype(np.int8), E8M0[scale] / np.float32(2)

    def weight(
        self, g: GraphBuilder, stored: StoredLinear, raw: ir.Value, *, packed_as_bytes: bool
    ) -> ir.Value:
        rows, columns = stored.weight.shape
        return raw if packed_as_bytes else g.reinterpret(raw, bodies.E2M1, (rows, 2 * columns))

    def onnxruntime_weight(
        self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value], x: ir.Value, resident: bool
    ) -> ir.Value:
        tables = [BYTE_TO_PAIR[:, 0], BYTE_TO_PAIR[:, 1], E8M0]
        low, high, powers = (bodies.table(g, values, x, resident) for values in tables)
        numbers = bodies.by_block(g, low, high, inputs["weight"], BLOCK)
        return bodies.times_factors(g, numbers, bodies.lookup(g, powers, inputs["scale"]))

    def tensorrt_weight(self, g: GraphBuilder, kind: LinearKind, inputs: Mapping[str, ir.Value]) -> ir.Value:
        return dequantized(g, inputs["weight"], inputs["scale"], name="widened")

    @property
    def byte_values(self) -> NDArray[np.float32]:
        return BYTE_TO_PAIR

    def expert_factors(self, g: GraphBuilder, parts: Mapping[str, ir.Value]) -> ir.Value:
        return bodies.lookup(g, g.constant(E8M0, np.float32), parts["scale"])


def dequantized(g: GraphBuilder, numbers: ir.Value, exponents: ir.Value, name: str) -> ir.Value:
    """FLOAT4E2M1 [..., n] and exponents [..., n/32] -> the graph's dtype, by TensorRT's own operator."""
    return g.op(
        *("TRT_MXFP8DequantizeLinear", numbers, exponents),
        name=name,
        domain=bodies.TRT_DOMAIN,
        axis=-1,
        block_size=BLOCK,
        output_dtype=int(g.dtype),
    )


def widened_blocks(g: GraphBuilder, blocks: ir.Value, scales: ir.Value, resident: bool) -> ir.Value:
    """uint8 [E,O,G,16] and [E,O,G] -> float32 [E,O,G*32]: exactly, or infinity where a product reaches 2**128."""
    index, exponent = (g.op("Cast", t, name="index", to=int(ir.DataType.INT32)) for t in (blocks, scales))
    if resident:  # in few steps: until it has folded the whole graph, the engine holds what each step made
        numbers = g.op("Gather", g.constant(BYTE_TO_PAIR, np.float32), index, name="numbers")
        scale = g.op("Gather", g.constant(E8M0, np.float32), exponent, name="scale")
    else:  # in quick ones: on entries this small, Gather takes ten times as long as GatherElements on one axis
        halves = [_entries(g, BYTE_TO_PAIR[:, i], index, name) for i, name in enumerate(("low", "high"))]
        numbers = g.op("Concat", *(g.unsqueeze(half, 4) for half in halves), name="numbers", axis=4)
        scale = _entries(g, E8M0, exponent, "scale")
    scaled = g.op("Mul", numbers, g.unsqueeze(scale, 3, 4), name="scaled")  # [E,O,G,16,2]
    return g.op("Reshape", scaled, g.constant([0, 0, -1]), name="widened")


def _entries(g: GraphBuilder, table: np.ndarray, index: ir.Value, name: str) -> ir.Value:
    flat = g.op("Reshape", index, g.constant([-1]), name="flat")
    found = g.op("GatherElements", g.constant(table, np.float32), flat, name=name, axis=0)
    return g.op("Reshape", found, g.op("Shape", index, name="shape"), name="as_index")


def tensorrt_blocks(g: GraphBuilder, blocks: ir.Value, scales: ir.Value, steps: int) -> Sequence[ir.Value]:
    """One [E/steps,O,I] in the graph's dtype per step, from blocks [E,O,G,16] and scales [E,O,G]."""
    experts, rows, groups, _ = (int(str(n)) for n in blocks.shape or ())
    count = experts // steps
    fp4 = g.parts(blocks, steps, ir.DataType.FLOAT4E2M1, (count, rows, groups * BLOCK))
    exponents = g.parts(scales, steps, ir.DataType.UINT8, (count, rows, groups))
    widened = [dequantized(g, *pair, name="dequantize") for pair in zip(fp4, exponents, strict=True)]
    for weight in widened:
        weight.type = ir.TensorType(g.dtype)
    return widened
