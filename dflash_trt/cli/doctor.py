"""`dflash-trt doctor`: versions, and the engines that this machine can build and run."""

from __future__ import annotations

import argparse

from dflash_trt.cli.options import add_common
from dflash_trt.cli.output import byte_count, print_json, print_table
from dflash_trt.extras import install

SUMMARY = "show versions and the engines that this machine can build and run"
DESCRIPTION = """\
Show versions, the processor, the GPUs, and the engines that this machine can build and run.
Exit code 1 if something required is missing.
"""
EXAMPLES = """\
examples:
  dflash-trt doctor
  dflash-trt doctor --json
"""

WITHOUT_VNNI = (
    "this processor has no VNNI: for one request at a time, build a target in four bits with --precision target=int8; "
    "for many, with target=fp32"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "--json")


def run(args: argparse.Namespace) -> int:
    """Print what is installed and what can run. Returns 1 if something required is missing."""
    from dflash_trt.hardware import instructions
    from dflash_trt.reports.environment import describe, kernels

    machine = describe() | {"kernels": kernels()}
    if args.json:
        print_json(machine)
        return 1 if machine["missing"] else 0
    print_table(
        [
            ("dflash-trt", machine["dflash_trt"]),
            ("python", machine["python"]),
            ("system", machine["system"]),
            ("processor", f"{machine['cpu']}, {machine['cores']} cores"),
            *([("weights", WITHOUT_VNNI)] if instructions() in ("AVX2", "AVX-512") else []),
            ("memory", "unknown" if machine["memory_bytes"] is None else byte_count(machine["memory_bytes"])),
            *(
                ("gpu", ", ".join(gpu.values()))
                for gpu in machine["gpus"] or [{"": "none that nvidia-smi shows"}]
            ),
            *((name, version or "missing") for name, version in machine["required"].items()),
            *((name, version or "not installed (optional)") for name, version in machine["optional"].items()),
            ("providers", ", ".join(machine["onnxruntime_providers"]) or "none"),
            ("kernels", _kernels(**machine["kernels"])),
        ]
    )
    print()
    yes = {True: "yes", False: "no"}
    rows = [(row["engine"], yes[row["build"]], yes[row["run"]], row["note"]) for row in machine["engines"]]
    print_table([("engine", "build", "run", ""), *rows], headings=1)
    return 1 if machine["missing"] else 0


def _kernels(triton: str | None, tested: bool, problem: str | None) -> str:
    """Whether builds for TensorRT compile kernels on this machine, and what happens if they do not."""
    if problem is None:
        known = "" if tested else f" (not a tested version: {install('tensorrt:triton')})"
        return f"compiled in builds by Triton {triton}{known}; running a bundle needs no compiler"
    return (
        f"not compiled in builds. {problem}. In bundles built here, torch's operators run between passes, the host "
        f"samples, and plans have no plugins ({install('tensorrt:triton')})"
    )
