"""`dflash-trt completion`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SUMMARY = "print a script that completes commands and options in a shell"
DESCRIPTION = """\
Print a script that completes commands, options, their values and files. Its package is installed by
pip install shtab.
"""
EXAMPLES = """\
examples:
  dflash-trt completion bash > ~/.local/share/bash-completion/completions/dflash-trt
  dflash-trt completion zsh > ~/.zfunc/_dflash-trt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "tcsh"), help="bash, zsh or tcsh")


def run(args: argparse.Namespace) -> int:
    """Print the shell's script."""
    from dflash_trt.errors import DFlashError
    from dflash_trt.extras import install

    try:
        import shtab
    except ImportError:
        raise DFlashError(f"completion needs shtab: {install('completion')}") from None
    _files(args.program, shtab.FILE)
    print(shtab.complete(args.program, shell=args.shell))
    return 0


def _files(parser: argparse.ArgumentParser, complete: Any) -> None:
    """Let every option that takes a path complete files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _files(command, complete)
        elif action.type is Path or action.dest == "bundle":
            action.complete = complete  # type: ignore[attr-defined]
