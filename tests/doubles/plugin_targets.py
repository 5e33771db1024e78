"""Compile every kernel that plans hold, for one target, and print what it is, as one JSON document.

Runs in its own process: kernels are compiled here, but interpreted in the process of the tests.
Usage: python -m tests.doubles.plugin_targets CAPABILITY [every]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from dflash_plugins import compiler
from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernel_table import KERNELS, Kernel

# gpt-oss-120b: hidden and inner size 2880, 4 of 128 experts, vocabulary 201,088, 5 taps. 64 query heads and 8 key heads
# of 64 numbers. Gated DeltaNet of Qwen3.5-4B: 16 key and 32 value heads of 128. A graph leaves -1 open.
VOCAB, D, E = 201_088, 2880, 128
ROW, ROWS = (-1,), (-1, -1)
MATRIX = [(E, 2 * D, D // 32, 16), (E, 2 * D, D // 32), (E, 2 * D)]
DOWN = [(E, D, D // 32, 16), (E, D, D // 32), (E, D)]
HEADS, CACHE = (-1, 64, -1, 64), (-1, 8, 4096, 64)
ATTEND, MERGE = [HEADS, CACHE, CACHE, ROWS, ROWS], [(-1, 64), ROW, ROW, HEADS, CACHE]
PENDING = [*((-1, -1, width) for width in (2048, 2048, 4096)), (-1, -1, 64), (-1, 32, 128, 128), (-1, 16, 64)]
BLOCKS = (-1, uses.in_blocks(D))
# Shapes of inputs, and attributes.
CASES: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "SampleTiles": ([(-1, -1, VOCAB), *[ROW] * 4], {}),
    "SampleSelect": ([(-1, -1, VOCAB), *[ROW] * 11], {}),
    "AcceptBlock": ([ROWS] * 3, {}),
    "HiddenStateTap": ([(-1, D)] * 5, {"n": 5}),
    "Attend": (ATTEND, {"group": 8, "windowed": 0}),
    "Attend to trees": ([*ATTEND, ROW, (-1, -1, -1)], {"group": 8, "windowed": 1}),
    "MergeAttention": (MERGE, {"group": 8, "heads": 64, "windowed": 0}),
    "MergeAttention with sinks": ([*MERGE, (64,)], {"group": 8, "heads": 64, "windowed": 1}),
    "MoERoute": ([(-1, E), (-1, D)], {"k": 4}),
    "MoEGroup": ([(-1, 4), (-1, E)], {"k": 4}),
    "MoEGateUp": ([BLOCKS, ROW, (E, 3), *MATRIX], {"k": 4, "alpha": 1.702, "beta": 1.0, "limit": 7.0}),
    "MoEDown": ([BLOCKS, (-1, 4), ROW, (E, 3), *DOWN], {}),
    "MoECombine": ([(-1, D), (-1, D)], {"k": 4}),
    "GatedDeltaNet": ([*PENDING, *[ROW] * 3], {}),
}


def functions() -> set[str]:
    """The names of all kernels, as their descriptions have them."""
    described = (Path(uses.__file__).with_name(name) for name in ("kernel_specs.py", "packed.py"))
    text = "".join(file.read_text() for file in described)
    found = re.findall(r'\bUse\(\s*"\w+",\s*"(\w+)"|_product\("(\w+)"', text)
    return {one or other for one, other in found}


def built(
    kernel: Kernel, shapes: list[tuple[int, ...]], attributes: dict[str, Any], target: int, *, every: bool
) -> Any:
    """One entry for each tile that a launch can have, or for the first of them."""
    s, a = kernel.sizes(shapes), kernel.given(attributes)
    ones = kernel.sizes([tuple(map(abs, shape)) for shape in shapes])
    inputs = kernel.inputs[: len(shapes)]
    order = [*inputs, *kernel.integers(ones, a), *kernel.outputs(ones, a)]
    pointers = len(shapes), len(kernel.outputs(ones, a))
    found = []
    for tile in kernel.tiles(s):
        if found and not every:
            break
        compiled = compiler.compile_kernel(kernel.use(s, a, "bf16", tile), target)
        if not compiled.fits:
            continue
        text = compiled.ptx
        entry = re.search(rf"\.entry {compiled.name}\((.*?)\n\)", text, re.S)
        assert entry is not None
        found.append(
            {
                "names": [list(compiled.parameters), order],
                "types": re.findall(r"\.param \.(u\d+)", entry[1]),
                "expected": ["u64"] * pointers[0]
                + ["u32"] * len(kernel.integers(ones, a))
                + ["u64"] * pointers[1],
                "threads": [str(compiled.threads), *re.findall(r"\.reqntid (\d+)", text)],
                "version": re.findall(r"\.version (\S+)", text)[0],
                "target": re.findall(r"\.target (\w+)", text)[0],
                "products": sorted(set(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", text))),
                "most_registers": [int(n) for n in re.findall(r"\.maxnreg (\d+)", text)],
                "fused": len(re.findall(r"\bfma\.", text)),
                "fusable": len(re.findall(r"\b(?:mul|add|sub)\.f", text)),  # by the assembler
                "registers": compiled.registers,
            }
        )
    return found


if __name__ == "__main__":
    by_name = {kernel.name: kernel for kernel in KERNELS}
    target, every = int(sys.argv[1]), len(sys.argv) > 2
    plans = {
        name: built(by_name[name.split()[0]], *case, target, every=every) for name, case in CASES.items()
    }
    json.dump(plans, sys.stdout)
