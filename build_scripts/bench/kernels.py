"""Registers, spills and shared memory of every kernel, for versions of Triton and compute capabilities.

    python -m pip install --no-deps --target /tmp/triton-3.8.0 triton==3.8.0
    python -m build_scripts.bench.kernels [--triton /tmp/triton-3.8.0 ...] [--details]

The installed Triton comes first, then those in the folders. Kernels have gpt-oss-120b's sizes, attention heads of 64 to
512 numbers, and Gated DeltaNet the heads of three models. A build leaves out tile shapes that spill registers or take
more than 48 KiB of shared memory; the tables count those that stay. --details adds one line for each kernel. Needs no
GPU. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from dflash_plugins import kernel_specs as uses

from build_scripts import harness
from dflash_trt.checkpoint.schema import PENDING_ROWS
from dflash_trt.hardware import processor

VOCAB, HIDDEN, TAPS, EXPERTS = 201_088, 2880, 5, 128
HEADS = (64, 128, 256, 512)
# Value heads.
DELTA = {"qwen3.5-4b": 32, "qwen3.8-27b": 48, "qwen3.5-122b-a10b": 64}


def kernels() -> Iterator[tuple[str, Any, uses.Use]]:
    """Kernels with tile shapes, and those without one, by the name of a group."""
    for head in HEADS:
        for shape in uses.attention_tiles(head):
            yield f"attention, heads of {head}", shape, uses.attend(8, 8, head, "bf16", shape, tree=True)
        yield "merge", head, uses.merge(64, head, "bf16", sinks=True)
    for tile in uses.TILES:
        inner = (HIDDEN, HIDDEN)
        yield "gate_up", tile, uses.gate_up(*inner, 4, 1.702, 1.0, 7.0, "bf16", True, tile)
        yield "down", tile, uses.down(*inner, "bf16", True, tile)
    yield "other kernels in plans", "route", uses.route(EXPERTS, 4)
    yield "other kernels in plans", "group", uses.group(EXPERTS, 4)
    yield "other kernels in plans", "combine", uses.combine(HIDDEN, 4, "bf16")
    yield "other kernels in plans", "taps", uses.gather_taps(TAPS, HIDDEN, "bf16", "bf16")
    for model, heads in DELTA.items():
        yield "Gated DeltaNet", model, uses.delta_rows(16, heads, 128, 128, PENDING_ROWS)
    for use in uses.round_uses(VOCAB, TAPS * HIDDEN, "bf16", 16):
        yield "between passes", use.function, use


def measured() -> dict[str, Any]:
    """The kernels compiled by the Triton of this process."""
    import triton
    from dflash_plugins.compiler import compile_kernel

    rows = []
    for name, what, use in kernels():
        tiled = isinstance(what, uses.Tile | uses.AttentionTile)
        label = " ".join(map(str, vars(what).values())) if tiled else str(what)
        for capability in uses.TARGETS:
            made = compile_kernel(use, capability)
            taken = {"registers": made.registers, "spills": made.spill_bytes, "shared": made.shared_bytes}
            rows.append({"kernel": name, "of": label, "sm": capability, **taken, "fits": made.fits})
    return {"triton": triton.__version__, "rows": rows}


def table(versions: list[dict[str, Any]]) -> Iterator[str]:
    """For each group of kernels and each version, how many fit each target, and the most that these take."""
    yield f"| kernel | Triton | {' | '.join(f'sm_{sm}' for sm in uses.TARGETS)} |"
    yield "|---|---|" + "---|" * len(uses.TARGETS)
    for name in dict.fromkeys(row["kernel"] for row in versions[0]["rows"]):
        for version in versions:
            cells = []
            for sm in uses.TARGETS:
                rows = [r for r in version["rows"] if (r["kernel"], r["sm"]) == (name, sm)]
                fit = [r for r in rows if r["fits"]]
                most = [max((r[field] for r in fit), default=0) for field in ("registers", "shared")]
                cell = f"{len(fit)} of {len(rows)}: {most[0]}, {most[1] / 1024:.0f} KiB"
                cells.append(cell if rows else "none")
            yield f"| {name} | {version['triton']} | {' | '.join(cells)} |"


def main() -> None:
    """Compile with each Triton in a process of its own, and print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--triton", nargs="*", default=[], metavar="DIR", help="folders with other versions of Triton"
    )
    parser.add_argument("--details", action="store_true", help="also print a line for each kernel")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        json.dump(measured(), sys.stdout)
        return
    versions = []
    for folder in ("", *args.triton):
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "build_scripts.bench.kernels", "--one"]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
        )
        versions.append(json.loads(done.stdout))
    for version in versions if args.details else []:
        for r in version["rows"]:
            print(
                f"{version['triton']}  sm_{r['sm']:<4} {r['kernel']:26} {r['of']:18} {r['registers']:>3} registers, "
                f"{r['spills']:>4} B spilled, {r['shared']:>6} B shared{'' if r['fits'] else ', left out'}"
            )
    print(*table(versions), sep="\n")
    print(json.dumps({"machine": processor(), "found": versions}))


if __name__ == "__main__":
    main()
