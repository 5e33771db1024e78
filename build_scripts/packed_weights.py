"""Weights in four and eight bits as they are stored, for `first_gpu.sh`: their products against those of widened ones,
with other tiles beside the project's.

    python -m build_scripts.packed_weights

Without a GPU there is nothing to measure: Triton's interpreter lacks the kernels' inline assembly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from dflash_plugins import layers as ours
from dflash_plugins import packed
from dflash_plugins.launch import Run

from build_scripts import harness
from build_scripts.first_gpu import DEVICE, GPU, TYPES, replayed
from dflash_trt.engines.device.kernels import kernels_here
from dflash_trt.engines.torch import checks, layers

FORMS: dict[str, dict[str, Any]] = {
    "int4": {"codes": "int4", "scales": "bf16", "group": 128},
    "nvfp4": {"codes": "e2m1", "scales": "e4m3", "group": 16, "second": "times"},
    "mxfp4": {"codes": "e2m1", "scales": "e8m0", "group": 32},
    "fp8": {"codes": "e4m3", "scales": "fp32"},
    "fp8 blocks": {"codes": "e4m3", "scales": "bf16", "group": 128, "group_rows": 128},
    "int8": {"codes": "int8", "scales": "bf16", "group": 128},
}
SIZES = (4096, 4096), (12_288, 4096), (4096, 12_288)
# Experts, those of a row, outputs and inputs: of Qwen3-30B-A3B and gpt-oss-20b.
STACKS = (128, 8, 768, 2048), (128, 8, 2048, 768), (32, 4, 2880, 2880)
# Tiles beside those of the project, by codes in a word.
TRIED = {
    4: ((64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 4), (32, 256, 4, 4)),
    2: ((64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4)),
}
# A product's weight, its rows, and of a stack their order and groups.
Call = tuple[packed.PackedWeight, torch.Tensor, Sequence[torch.Tensor]]


def main() -> int:
    """Exit code 1 if a kernel's numbers are wrong."""
    harness.parser(__doc__).parse_args()
    rows = list[dict[str, Any]]()
    if GPU:
        run = kernels_here({})
        for (out, columns), name in product(SIZES, FORMS):
            rows.append(linear(packed.Packing(out, columns, **FORMS[name]), name, run))
            print(rows[-1], flush=True)
        for (experts, k, out, columns), name in product(STACKS, ("int4", "nvfp4", "fp8 blocks")):
            form = packed.Packing(out, columns, **FORMS[name], experts=experts)
            rows.append(stack(form, k, name, run))
            print(rows[-1], flush=True)
    wrong = [row for row in rows if row["problem"] or row["error"] > 0.01]
    device = torch.cuda.get_device_name() if GPU else "CPU"
    print(json.dumps({"device": device, "torch": torch.__version__, "packed": rows, "wrong": wrong}))
    return int(bool(wrong))


def linear(form: packed.Packing, name: str, run: Run) -> dict[str, Any]:
    """A linear layer; microseconds of each tile with 1 and 8 rows, over weights that fit no cache."""
    stored, wide = checks.random_weight(form, DEVICE)
    x, dense = drawn(64, form), wide.to(TYPES[0])
    made = {n: packed.product(x[:n].to(DEVICE), stored, None, run).cpu() for n in (1, 8, 33, 64)}
    copies = (160 << 20) // stored.nbytes
    weights = [stored, *(replace(stored, codes=stored.codes.clone()) for _ in range(copies))]
    calls: list[list[Call]] = [[(each, x[:n].to(DEVICE), ()) for each in weights] for n in (1, 8)]
    equal = torch.equal(packed.widen(stored, TYPES[0], run).cpu(), dense)
    exact = x.double() @ dense.double().T
    return result(form, name, stored, made, exact, equal) | {"microseconds": timed(calls, form, run)}


def stack(form: packed.Packing, k: int, name: str, run: Run) -> dict[str, Any]:
    """A layer of experts with k for each row; microseconds of each tile with 1, 8 and 512 rows, with other experts in
    each call, and with 8 and 512 of torch's product with widened weights.
    """
    stored, wide = checks.random_weight(form, DEVICE)
    dense, x = wide.to(TYPES[0]), drawn(512 * k, form).to(DEVICE)
    logits = torch.randn(512, form.experts, generator=torch.Generator().manual_seed(1))
    best = logits.argsort(dim=1, descending=True, stable=True)[:, :k].flatten()

    def call(n: int, shift: int = 0) -> Call:
        _, _, *by_expert = ours.route(logits[:n].roll(shift, 1).contiguous().to(DEVICE), k, run)
        return stored, x[: n * k], by_expert

    made = {n * k: multiplied(call(n), stored.tile, run).cpu() for n in (1, 8, 33, 64, 512)}
    most, last = 64 * k, form.experts - 1
    exact = layers.grouped_product({}, x[:most].cpu().float(), dense.float(), best[:most])
    equal = torch.equal(packed.widen(stored.one(last), TYPES[0], run).cpu(), dense[last])
    calls = [[call(n, shift) for shift in range(0, form.experts, k)] for n in (1, 8)] + [[call(512)]]
    there, chosen = dense.to(DEVICE), best.to(DEVICE)
    by_torch = [
        round(1e6 * replayed(partial(layers.grouped_product, {}, x[: n * k], there, chosen[: n * k])), 2)
        for n in (8, 512)
    ]
    row = result(form, name, stored, made, exact, equal)
    return row | {"microseconds": timed(calls, form, run), "widened, by torch": by_torch}


def drawn(rows: int, form: packed.Packing) -> torch.Tensor:
    """Random inputs."""
    return torch.randn(rows, form.inputs, generator=torch.Generator().manual_seed(0)).to(TYPES[0])


def result(
    form: packed.Packing,
    name: str,
    stored: packed.PackedWeight,
    made: dict[int, torch.Tensor],
    exact: torch.Tensor,
    equal: bool,
) -> dict[str, Any]:
    """The largest error as a share of the largest number; a problem if a row depends on the others of its pass."""
    longest, known = made[max(made)], len(exact)
    error = float((longest[:known].double() - exact.double()).abs().max() / exact.abs().max())
    alike = all(torch.equal(y, longest[:n]) for n, y in made.items())
    size = f"{form.experts} x " * (form.experts > 0) + f"{form.outputs} x {form.inputs}"
    problem = "" if alike and equal else "other bits"
    return {"form": name, "size": size, "bytes": stored.nbytes, "error": error, "problem": problem}


def timed(calls: Sequence[Sequence[Call]], form: packed.Packing, run: Run) -> dict[str, Any]:
    """Microseconds of a call of each of the lists, by tile."""
    tiles: dict[str, Any] = {}
    for tile in (packed.TILES[form.in_word][0], *(packed.Tile(*shape) for shape in TRIED[form.in_word])):
        name = str(tuple(vars(tile).values()))
        try:
            times = [replayed(partial(all_of, some, tile, run), calls=1) / len(some) for some in calls]
            tiles[name] = [round(1e6 * seconds, 2) for seconds in times]
        except Exception as problem:  # of the compiler or the driver: the others go on
            tiles[name] = str(problem)[:100]
    return tiles


def all_of(calls: Sequence[Call], tile: packed.Tile, run: Run) -> None:
    """One after the other."""
    for call in calls:
        multiplied(call, tile, run)


def multiplied(call: Call, tile: packed.Tile, run: Run) -> torch.Tensor:
    """A product."""
    weight, x, by_expert = call
    weight = replace(weight, tile=tile)
    if not by_expert:
        return packed.product(x, weight, None, run)
    order, groups = by_expert
    return packed.experts_product(x, weight, order, groups, run)


if __name__ == "__main__":
    sys.exit(main())
