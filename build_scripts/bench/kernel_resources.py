"""The GPU resources of the plugins' kernels, as a Markdown table: the one in docs/plugins.md.

    python -m build_scripts.bench.kernel_resources

Compiles the kernels for every target at gpt-oss-120b's sizes, without a GPU, with Triton's ptxas and nvdisasm. "per
weight" counts a thread's machine instructions in the products' inner loop, per 4-bit weight.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from dflash_plugins import compiler
from dflash_plugins import kernel_specs as uses
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

KERNELS = {
    "gather_taps": uses.gather_taps(5, 2880, "bf16", "bf16"),
    "sample_tiles": uses.sample_tiles(201_088),
    "sample_select": uses.sample_select(201_088),
    "accept_block": uses.accept_block(block_size=10),
    **{
        f"{name} {t.rows}x{t.slots}": uses.attend(8, 8, 64, "bf16", t, tree=name == "attend (tree)")
        for t in uses.ATTENTION_TILES
        for name in ("attend", "attend (tree)")
    },
    "merge": uses.merge(64, 64, "bf16", sinks=True),
    "route": uses.route(128, 4),
    "group": uses.group(128, 4),
    **{
        f"{name} {t.block_n}x{t.block_k}x{t.tokens}, {t.num_stages} stages": use
        for t in uses.TILES
        for name, use in (
            ("gate_up", uses.gate_up(2880, 2880, 4, 1.702, 1.0, 7.0, "bf16", True, t)),
            ("down", uses.down(2880, 2880, "bf16", True, t)),
        )
    },
    "combine": uses.combine(2880, 4, "bf16"),
}


def instructions_per_weight(compiled: compiler.Compiled, capability: int, use: uses.Use) -> str:
    """Instructions in the innermost loop with the tensor core's instructions."""
    if "BLOCK_K" not in use.constants:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(compiled.ptx)
        ptxas = get_ptxas(capability).path
        subprocess.run(
            [ptxas, f"-arch={compiler.architecture(capability)}", str(source), "-o", str(cubin)], check=True
        )
        disassemble = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
        lines = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout.splitlines()
    code = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\.(L_x_\d+):", line.strip()))}
    jumps = [(m[1], i) for i, line in enumerate(lines) if (m := re.search(r"BRA.*`\(\.(L_x_\d+)\)", line))]
    loops = []
    for label, end in jumps:
        body = [m[1] for line in lines[labels[label] : end + 1] if (m := code.search(line))]
        if labels[label] < end and any(re.match("HGMMA|HMMA", name) for name in body):
            loops.append(len(body))
    if not loops:
        return "?"
    weights = use.constants["BLOCK_N"] * use.constants["BLOCK_K"] * (2 if use.function == "gate_up" else 1)
    return f"{min(loops) * compiled.threads / weights:.1f}"


def main() -> None:
    print(
        f"Triton {triton.__version__}, PTX {compiler.PTX_VERSION / 10}; registers / shared bytes / spilled bytes.\n"
    )
    columns = [
        c
        for target in uses.TARGETS
        for c in (f"sm_{target}", "per weight")
        if (target, c) != (100, "per weight")
    ]
    print("| kernel | threads | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for name, use in KERNELS.items():
        cells = []
        for capability in uses.TARGETS:
            compiled = compiler.compile_kernel(use, capability)
            r = compiler.resources(compiled, capability)
            cells.append(f"{r.registers} / {r.shared_bytes} / {r.spill_bytes}")
            if capability != 100:  # there the loop is unrolled differently
                cells.append(instructions_per_weight(compiled, capability, use))
        print(f"| `{name}` | {compiled.threads} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
