"""The `dflash-trt` command: each command is a module that declares its arguments and prints results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dflash_trt.cli import (
    bench,
    build,
    deploy,
    doctor,
    generate,
    inspect,
    pairs,
    plan,
    quantize,
    serve,
    train,
    verify,
)
from dflash_trt.errors import DFlashError

COMMANDS = {
    "build": build,
    "quantize": quantize,
    "generate": generate,
    "serve": serve,
    "verify": verify,
    "bench": bench,
    "deploy": deploy,
    "inspect": inspect,
    "plan": plan,
    "train": train,
    "pairs": pairs,
    "doctor": doctor,
}

EXAMPLES = """\
examples:
  dflash-trt build --target tiny
  dflash-trt generate bundles/tiny --chat --prompt "What is 17 + 25?" --stats
  dflash-trt verify bundles/tiny
  dflash-trt bench bundles/tiny

`dflash-trt COMMAND --help` shows the options and examples of one command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 error or difference, 130 Ctrl-C, 141 closed pipe.

    Wrong usage raises `SystemExit(2)`, `--help` raises `SystemExit(0)`, as in argparse.
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ndflash-trt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left (`| head`). The interpreter flushes stdout when it ends. Let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DFlashError, OSError, UnicodeError) as error:
        if args.debug:
            raise
        print(f"dflash-trt: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dflash-trt",
        description="Build and run DFlash pairs: a target, and a drafter that proposes blocks of tokens.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=raw,
        )
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=module.run, usage_error=command.error)
    return parser
