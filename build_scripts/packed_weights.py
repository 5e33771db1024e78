"""Weights as they are stored, in 16, eight and four bits, for `first_gpu.sh`: their products against cuBLAS's of the
widened ones and against float64, with other tiles beside the project's.

    python -m build_scripts.packed_weights

Kernels are compiled in parallel before anything is measured. Without a GPU there is nothing to measure: Triton's
interpreter lacks the kernels' inline assembly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from dflash_plugins import layers as ours
from dflash_plugins import packed
from dflash_plugins.kernel_specs import ROUND_TARGET, Use
from dflash_plugins.launch import Run
from torch import Tensor

from build_scripts import harness
from build_scripts.first_gpu import DEVICE, GPU, TYPES, replayed
from dflash_trt.engines.device.kernels import kernels_here, target
from dflash_trt.engines.torch import layers
from tests.doubles.packed_weights import random_weight

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"codes": "plain"},
    "int4": {"codes": "int4", "scales": "bf16", "group": 128},
    "fp8 blocks": {"codes": "e4m3", "scales": "bf16", "group": 128, "group_rows": 128},
    "nvfp4": {"codes": "e2m1", "scales": "e4m3", "group": 16, "second": "times"},
    "mxfp4": {"codes": "e2m1", "scales": "e8m0", "group": 32},
    "fp8": {"codes": "e4m3", "scales": "fp32"},
    "int8": {"codes": "int8", "scales": "bf16", "group": 128},
}
# The first three forms are measured with other tiles, by codes in a word, and in the other sizes, too.
SIZES = (4096, 4096), (24_576, 4096), (4096, 12_288)
# The others of Qwen3-8B and gpt-oss-20b in BF16.
PLAIN_SIZES = (6144, 4096), (151_936, 4096), (5120, 2880), (2880, 4096), (201_088, 2880)
TRIED = {4: (packed.Tile(64, 128, 4, 4),), 2: (packed.Tile(64, 64, 4, 4),), 1: packed.TILES[1][1:]}
# Experts, those of a row, outputs and inputs: of Qwen3-30B-A3B. So many experts differ.
STACKS = (128, 8, 768, 2048), (128, 8, 2048, 768)
DIFFERENT = 16


@dataclass
class Case:
    """Products of one weight. `calls`: by a tile or another name and a number of rows, products that read different
    memory, of which the first is compared with `exact`.
    """

    names: dict[str, Any]
    exact: Tensor
    calls: dict[tuple[str, int], list[Callable[[Run], Tensor]]] = field(default_factory=dict)

    def measured(self, run: Run) -> dict[str, Any]:
        """Microseconds of a call; the largest error as a share of the largest number; a problem if a row depends on the
        others of its pass.
        """
        error, problem, times = 0.0, "", dict[str, dict[int, Any]]()
        longest = dict[str, Tensor]()
        for (name, rows), calls in self.calls.items():
            try:
                y = calls[0](run)
                known = self.exact[: len(y)].double()
                error = max(error, float((y[: len(known)] - known).abs().max() / known.abs().max()))
                if name != "cuBLAS" and not torch.equal(longest.setdefault(name, y)[: len(y)], y):
                    problem = "other bits"
                seconds = replayed(lambda calls=calls: [call(run) for call in calls], calls=1)  # type: ignore[misc]
                times.setdefault(name, {})[rows] = round(1e6 * seconds / len(calls), 2)
            except Exception as failure:  # of the compiler or the driver: the others go on
                times.setdefault(name, {})[rows] = str(failure)[:100]
        return self.names | {"error": error, "problem": problem, "microseconds": times}


def main() -> int:
    """Exit code 1 if a kernel's numbers are wrong."""
    harness.parser(__doc__).parse_args()
    rows = list[dict[str, Any]]()
    if GPU:
        run, cases = kernels_here({}), list[Case]()
        for number, size in enumerate(SIZES):
            cases += [linear(name, size) for name in list(FORMS)[: 3 if number else None]]
        cases += [linear("bf16", size) for size in PLAIN_SIZES]
        cases += [stack(name, *sizes, run) for sizes in STACKS for name in list(FORMS)[1:4]]
        compile_all(cases)
        for case in cases:
            rows.append(case.measured(run))
            print(rows[-1], flush=True)
    wrong = [row for row in rows if row["problem"] or not row["error"] <= 0.01]
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(json.dumps({"device": device, "torch": torch.__version__, "packed": rows, "wrong": wrong}))
    return int(bool(wrong))


def compile_all(cases: list[Case]) -> None:
    """Fill the cache of kernels."""
    from dflash_plugins.compiler import compile_kernel

    wanted = dict[str, Use]()
    for case in cases:
        for calls in case.calls.values():
            calls[0](lambda use, grid, **arguments: wanted.update({use.digest: use}))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        # What cannot be compiled is told where it is launched.
        for job in [pool.submit(compile_kernel, use, target() or ROUND_TARGET) for use in wanted.values()]:
            job.exception()


def linear(name: str, size: tuple[int, int]) -> Case:
    """A linear layer with 256, 64, 16, 8 and 1 rows, and torch's product with the widened weight."""
    form = packed.Packing(*size, **FORMS[name])
    stored, wide = random_weight(form, DEVICE)
    x, dense = drawn(256, form.inputs), wide.to(DEVICE, TYPES[0])
    case = Case(named(form, name, stored), F.linear(x[:64].double(), dense.double()))
    others = [
        stored,
        *(replace(stored, codes=stored.codes.clone()) for _ in range((160 << 20) // stored.nbytes)),
    ]
    for tile in (stored.tile, *(TRIED[form.in_word] if name in list(FORMS)[:3] else ())):
        weights = [replace(w, tile=tile) for w in others]
        for n in (256, 64, 16, 8, 1):
            case.calls[str(tile), n] = [partial(packed.product, x[:n], w, None) for w in weights]
    wides = [dense, *(dense.clone() for _ in range((160 << 20) // dense.nbytes))]
    for n in (256, 64, 16, 1):
        case.calls["cuBLAS", n] = [lambda run, n=n, w=w: F.linear(x[:n], w) for w in wides]  # type: ignore[misc]
    if name != "bf16":
        case.calls["widen", 256] = [lambda run: F.linear(x, packed.widen(stored, TYPES[0], run))]
    return case


def stack(name: str, experts: int, k: int, outputs: int, inputs: int, run: Run) -> Case:
    """A layer of experts with k for each of 512, 16, 8 and 1 rows, in each call others; and the product with widened
    weights.
    """
    form = packed.Packing(outputs, inputs, **FORMS[name], experts=DIFFERENT)
    some, wide = random_weight(form, DEVICE)
    repeats = experts // DIFFERENT
    fields: dict[str, Any] = {
        n: t if t is None else t.repeat(repeats, *[1] * (t.ndim - 1)) for n, t in some.stored.items()
    }
    stored = replace(some, form=replace(form, experts=experts), **fields)
    dense = wide.to(DEVICE, TYPES[0]).repeat(repeats, 1, 1)
    logits = torch.randn(512, experts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    best = logits.argsort(dim=1, descending=True, stable=True)[:64, :k].flatten()
    x = drawn(512 * k, inputs)
    plain = packed.plain(dense)
    case = Case(
        named(stored.form, name, stored), layers.grouped_product({}, x[: 64 * k].float(), dense.float(), best)
    )
    for n in (512, 16, 8, 1):
        shifted = [logits[:n].roll(shift, 1) for shift in range(0, experts, min(n * k, experts))]
        routes = [ours.route(call, k, run)[2:] for call in shifted]
        calls = [(x[: n * k], stored, *route) for route in routes]
        case.calls[str(stored.tile), n] = [partial(packed.experts_product, *call) for call in calls]
        wides = [(x[: n * k], plain, *route) for route in routes]
        case.calls["widened", n] = [partial(packed.experts_product, *call) for call in wides]
    return case


def drawn(rows: int, inputs: int) -> Tensor:
    """Random inputs."""
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)).to(DEVICE, TYPES[0])


def named(form: packed.Packing, name: str, stored: packed.PackedWeight) -> dict[str, Any]:
    """What a line begins with."""
    size = f"{form.experts} x " * (form.experts > 0) + f"{form.outputs} x {form.inputs}"
    return {"form": name, "size": size, "bytes": stored.nbytes}


if __name__ == "__main__":
    sys.exit(main())
