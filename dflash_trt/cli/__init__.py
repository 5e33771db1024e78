"""The `dflash-trt` command: each command is a module that declares its arguments and prints results."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from dflash_trt.cli import (
    bench,
    build,
    chat,
    deploy,
    doctor,
    fit,
    generate,
    inspect,
    pairs,
    plan,
    quantize,
    selftest,
    serve,
    train,
    verify,
)
from dflash_trt.cli.options import DEBUG, LOG_LEVEL, option, switch
from dflash_trt.errors import DFlashError, UsageError, did_you_mean
from dflash_trt.extras import install
from dflash_trt.logs import LEVELS, to_stderr
from dflash_trt.version import __version__

COMMANDS = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(build, chat, generate, serve, verify, selftest, bench, deploy, inspect),
        *(plan, quantize, fit, train, pairs, doctor),
    )
}

EXAMPLES = """\
examples:
  dflash-trt chat smollm2-135m
  dflash-trt generate smollm2-135m --chat --prompt "What is the capital of Japan?" --stats
  dflash-trt serve smollm2-135m
  dflash-trt verify smollm2-135m
  dflash-trt bench smollm2-135m --requests 8 --concurrency 1,4

`dflash-trt COMMAND --help` shows the options and examples of one command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 error or difference, 130 Ctrl-C, 141 closed pipe.

    Wrong usage, of any kind, raises `SystemExit(2)`, `--help` raises `SystemExit(0)`, as in argparse.
    """
    _open_streams()
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args, unknown = parser.parse_known_args(words[:end])
    if args.command is None:
        parser.print_help()
        return 2
    if wrong := next((word for word in words if _undecoded(word)), None):
        args.usage_error(
            f"{wrong!a}: is not text in {sys.getfilesystemencoding()}, this system's encoding; write it in UTF-8, and "
            "set PYTHONUTF8=1"
        )
    args.passed = words[end + 1 :]  # options for another program
    if unknown or (args.passed and args.command != "serve"):
        args.parser.unknown(unknown or args.passed)
    to_stderr(args.log_level or "warning")
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
    except UsageError as error:
        if args.debug:
            raise
        refuse: Callable[[str], NoReturn] = getattr(args, "step_error", args.usage_error)
        refuse(str(error))
    except (DFlashError, ImportError, OSError, UnicodeError, MemoryError) as error:
        if args.debug:
            raise
        print(f"dflash-trt: error: {_said(error)}", file=sys.stderr)
        return 1


def _open_streams() -> None:
    """Give standard streams that are closed a null device, so that no file gets their descriptors. A stream that
    encodes less than Unicode shows `?` for the other characters.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is its own
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=descriptor != number))  # noqa: SIM115
        elif number == 1 and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _undecoded(word: str) -> bool:
    """Whether an argument has bytes that the system's encoding lacks; Python keeps them as lone surrogates."""
    return any("\udc80" <= character <= "\udcff" for character in word)


def _said(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"the Python package {package} is not installed: {install(f':{package}')}"
    if isinstance(error, MemoryError):
        return f"no memory is left ({error or 'the system gives no more'}); nothing was kept of this"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" for {error.filename}" if error.filename else ""
        return (
            f"the disk is full: no space is left{place}; free some, or choose another place (TMPDIR, for temporary "
            "files). Nothing was kept"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: cannot be used ({error.strerror})" if error.filename else error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"standard input is not text in {error.encoding} (byte {error.start})"
    return str(error)


def make_parser() -> CommandParser:
    """The parser of all commands. Parsed arguments have the command's own as `parser`."""
    parser = CommandParser(
        prog="dflash-trt",
        description="Build and run DFlash pairs: a target, and a drafter that proposes blocks of tokens.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"dflash-trt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.DESCRIPTION, epilog=module.EXAMPLES
        )
        module.add_arguments(command)
        switch(command, "--debug", DEBUG)
        if "--log-level" not in command._option_string_actions:  # `serve` has one of its own
            option(command, "--log-level", None, str, LOG_LEVEL, "warning", choices=tuple(LEVELS))
        command.set_defaults(run=module.run, usage_error=command.error, parser=command)
    return parser


class _Help(argparse.RawDescriptionHelpFormatter):
    """The usage line names what must be given. The other options stand below, each with its text."""

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        every, choices = list(actions), [group for group in groups if group.required]
        one_of = [action for group in choices for action in group._group_actions]
        needed = [a for a in every if a.required or not a.option_strings or a in one_of]
        prog = self._prog
        if len(needed) < len(every):
            self._prog = f"{prog} [options]"
        try:
            return super()._format_usage(usage, needed, choices, prefix)
        finally:
            self._prog = prog


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors leave out the usage of every option."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(formatter_class=_Help, **arguments)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` shows the options and examples\n")

    def unknown(self, words: list[str]) -> NoReturn:
        word = words[0].partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        near = did_you_mean(word, [option for option in options if option.startswith("--")])
        self.error(f"unknown argument {words[0]!r}{near if word.startswith('-') else ''}")
