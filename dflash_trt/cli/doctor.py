"""`dflash-trt doctor`: versions, and the engines that this machine can build and run."""

from __future__ import annotations

import argparse

from dflash_trt.cli.output import byte_count, print_json, print_table

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.reports.environment import describe

    found = describe()
    if args.json:
        print_json(found)
        return 1 if found["missing"] else 0
    print_table(
        [
            ("dflash-trt", found["dflash_trt"]),
            ("python", found["python"]),
            ("system", found["system"]),
            ("processor", f"{found['cpu']}, {found['cores']} cores"),
            ("memory", "unknown" if found["memory_bytes"] is None else byte_count(found["memory_bytes"])),
            *(
                ("gpu", ", ".join(gpu.values()))
                for gpu in found["gpus"] or [{"": "none that nvidia-smi shows"}]
            ),
            *((name, version or "missing") for name, version in found["required"].items()),
            *((name, version or "not installed (optional)") for name, version in found["optional"].items()),
            ("providers", ", ".join(found["onnxruntime_providers"]) or "none"),
        ]
    )
    print()
    yes = {True: "yes", False: "no"}
    rows = [(row["engine"], yes[row["build"]], yes[row["run"]], row["note"]) for row in found["engines"]]
    print_table([("engine", "build", "run", ""), *rows], heading=True)
    return 1 if found["missing"] else 0
