"""`dflash-trt selftest`: check a bundle on the machine that will run it."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from dflash_trt.cli.options import add_bundle, at_least, bundle_of, option, switch
from dflash_trt.cli.output import print_table

SUMMARY = "check a bundle's numbers on this machine, step by step"
DESCRIPTION = """\
Check a bundle on this machine, from versions to tokens and times. Each check says what it proves. The first one that
fails is nearest to the cause. A report is written as JSON; send it with a bug report.
Exit code 1 if a check fails.
"""
EXAMPLES = """\
examples:
  dflash-trt selftest bundles/tiny-rtx
  dflash-trt selftest bundles/tiny-rtx --reference bundles/tiny --report selftest.json
  dflash-trt selftest --kernels

--reference is a bundle of the same pair for ONNX Runtime, or for torch in fp32 on the same GPU. Then the numbers are
compared, too, layer by layer.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser, nargs="?")
    option(parser, "--reference", "BUNDLE", Path, "the same pair, built with --engine onnxruntime or torch")
    option(parser, "--report", "FILE", Path, default=Path("selftest.json"))
    switch(parser, "--kernels", "compare each kernel with its reference on the GPU; needs no bundle")
    option(parser, "--timeout", "SECONDS", at_least(1), "the longest time of one check", 300)


def run(args: argparse.Namespace) -> int:
    """Print each check when it has ended. Returns 1 if one fails."""
    if (args.bundle is None) != args.kernels:
        args.usage_error("give a BUNDLE, or --kernels, which needs none")
    return _kernels(args.report) if args.kernels else _bundle(args)


def _kernels(report: Path) -> int:
    from dflash_trt.files.disk import write_object
    from dflash_trt.reports.kernels import check_kernels

    found = check_kernels()
    write_object(report, found)
    rows = [
        (name, dtype, problem)
        for dtype, problems in found["problems"].items()
        for name, problem in problems.items()
    ]
    print_table([("failed" if problem else "passed", name, dtype, problem) for name, dtype, problem in rows])
    print(f"ran on {found['gpu'] or 'the CPU, in the interpreter'}\nreport: {report}")
    return int(any(problem for _, _, problem in rows))


def _bundle(args: argparse.Namespace) -> int:
    from dflash_trt.reports.selftest import Selftest

    failed = False
    with closing(Selftest(bundle_of(args).path, args.reference)) as test:
        for check in test.run(args.report, args.timeout):
            figures = ", ".join(f"{name} {value}" for name, value in check.figures.items())
            print_table([(check.state, check.name, check.detail or figures or check.proves)])
            failed |= check.state == "failed"
    print(f"report: {args.report}")
    return int(failed)
