"""The parser of the command line: wrong usage is one line and a hint."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from dflash_trt.errors import did_you_mean


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
        """End the program with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` shows the options and examples\n")

    def unknown(self, words: list[str]) -> NoReturn:
        """End the program for words that no option takes."""
        word = words[0].partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        near = did_you_mean(word, [option for option in options if option.startswith("--")])
        self.error(f"unknown argument {words[0]!r}{near if word.startswith('-') else ''}")
