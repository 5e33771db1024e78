"""Milliseconds of the products of a model's linear layers alone, by kernel of ONNX Runtime and rows of a pass.

    python -m build_scripts.bench.products [--layers 30] [--threads 2] [--kernels KERNEL ...]

The shapes are those of SmolLM2-135M, without its head. Weights are random. Also the bandwidth at which the threads read
memory with NumPy.

gemm: float32.  nbitsBxN: MatMulNBits, B bits in blocks of N, inputs in eight bits.  integer: MatMulInteger, bytes.
w8a8-u8, w8a8-s8: products of integers between float32 inputs and results. Each row is divided by its largest magnitude
and rounded to eight bits, so that it depends on no other row. Weights are in unsigned or signed bytes, with a scale per
output. Unsigned ones are exact on every processor. Without VNNI, sums of signed ones may saturate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import MICROSOFT_DOMAIN
from dflash_trt.hardware import cores, processor

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # inputs, outputs of a layer's products
ROWS = (1, 2, 4, 8, 16)
_TINY = 2.0**-100  # the smallest magnitude assumed for a row


def by_rows(
    g: GraphBuilder, x: ir.Value, weight: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]
) -> ir.Value:
    """x [rows, in] @ weight [in, out], in integers, with a scale for each row; `weight` is in bytes, `scale` [out]."""
    largest = g.op("ReduceMax", g.op("Abs", x), g.constant([-1]), keepdims=1)
    largest = g.op("Max", largest, g.constant(_TINY, np.float32))
    zero = g.constant(128, np.uint8)
    codes = g.op("QuantizeLinear", g.op("Div", x, largest), g.constant(1 / 127, np.float32), zero)
    y = g.op(
        *("MatMulIntegerToFloat", codes, g.constant(weight, weight.dtype), g.constant(1 / 127, np.float32)),
        *(g.constant(scale, np.float32), zero, zero if weight.dtype == np.uint8 else None),
        domain=MICROSOFT_DOMAIN,
    )
    return g.op("Mul", y, largest)


def graph(kernel: str, layers: int) -> tuple[bytes, int]:
    """A model with all products, and the bytes of its weights."""
    g, random, total = GraphBuilder("products"), np.random.default_rng(0), 0
    g.graph.opset_imports[MICROSOFT_DOMAIN] = 1
    dtype = ir.DataType.UINT8 if kernel == "integer" else FLOAT
    x = {size: g.input(f"x{size}", dtype, ["M", size]) for size in {shape[0] for shape in SHAPES}}
    for i in range(layers):
        for j, (inputs, outputs) in enumerate(SHAPES):
            arrays: list[np.ndarray[Any, Any]]
            if kernel == "gemm":
                arrays = [random.standard_normal((outputs, inputs), dtype=np.float32)]
                y = g.op("Gemm", x[inputs], g.constant(arrays[0], np.float32), transB=1)
            elif kernel == "integer":
                arrays = [random.integers(-127, 127, (inputs, outputs), dtype=np.int8)]
                y = g.op("MatMulInteger", x[inputs], g.constant(arrays[0], np.int8))
            elif kernel.startswith("w8a8"):
                codes = random.integers(-127, 127, (inputs, outputs), dtype=np.int8)
                weight = (codes.astype(np.int16) + 128).astype(np.uint8) if kernel == "w8a8-u8" else codes
                arrays = [weight, random.random(outputs, dtype=np.float32)]
                y = by_rows(g, x[inputs], *arrays)
            else:
                bits, block = map(int, kernel.removeprefix("nbits").split("x"))
                blocks = -(-inputs // block)
                arrays = [
                    random.integers(0, 255, (outputs, blocks, block * bits // 8), dtype=np.uint8),
                    random.random((outputs, blocks), dtype=np.float32),
                ]
                packed, factors = (g.constant(array, array.dtype) for array in arrays)
                sizes: dict[str, Any] = {
                    "K": inputs,
                    "N": outputs,
                    "bits": bits,
                    "block_size": block,
                    "accuracy_level": 4,
                }
                y = g.op("MatMulNBits", x[inputs], packed, factors, domain=MICROSOFT_DOMAIN, **sizes)
            total += sum(array.nbytes for array in arrays)
            kind = ir.DataType.INT32 if kernel == "integer" else FLOAT
            g.output(y, f"y{i}_{j}", kind, ["M", outputs])
    return ir.to_proto(g.model({})).SerializeToString(), total


def measure(kernel: str, layers: int, threads: int) -> None:
    model, size = graph(kernel, layers)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session: Any = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    random, cells = np.random.default_rng(0), []
    for rows in ROWS:
        binding = session.io_binding()
        for each in session.get_inputs():
            dtype = np.uint8 if kernel == "integer" else np.float32
            binding.bind_cpu_input(each.name, (255 * random.random((rows, each.shape[1]))).astype(dtype))
        for each in session.get_outputs():
            binding.bind_output(each.name)
        seconds = []
        for _ in range(25):
            begin = time.perf_counter()
            session.run_with_iobinding(binding)
            seconds.append(time.perf_counter() - begin)
        cells.append(statistics.median(seconds))
    text = "  ".join(f"{rows} rows {1e3 * each:6.2f} ms" for rows, each in zip(ROWS, cells, strict=True))
    print(
        f"{kernel:<10} {size / 1e6:4.0f} MB  {text}  {size / cells[0] / 1e9:.1f} GB/s at one row", flush=True
    )


def bandwidth(threads: int) -> float:
    """GB/s of reading 512 MB, the best of ten."""
    parts = np.array_split(np.ones(64 << 20), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(10):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - begin)
    return sum(part.nbytes for part in parts) / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=["gemm", "nbits8x32", "nbits8x64", "nbits4x32", "integer", "w8a8-u8", "w8a8-s8"],
    )
    args = parser.parse_args()
    print(f"{processor()}, {args.threads} threads, onnxruntime {ort.__version__}")
    for threads in sorted({1, args.threads}):
        print(f"NumPy reads {bandwidth(threads):.1f} GB/s with {threads} threads")
    for kernel in args.kernels:
        measure(kernel, args.layers, args.threads)


if __name__ == "__main__":
    main()
