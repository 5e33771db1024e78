"""The parser of the command line: wrong usage is one line and a hint, with the nearest known word."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from dflash_trt.errors import did_you_mean

_WIDEST = 120  # characters of a line, of the texts here and of what is printed


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps the prose of descriptions to the terminal. Indented lines, such as commands, stay as they are.

    The usage line names what must be given. The other options stand below, each with its text.
    """

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

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs: list[str] = []
        before = ""
        for line in text.splitlines():
            # A line that would have fitted after the one before begins something new.
            broken = before and line and len(before) + 1 + len(line.split()[0]) > _WIDEST
            if broken and not (line.startswith(" ") or before.startswith(" ")):
                paragraphs[-1] += " " + line
            else:
                paragraphs.append(line)
            before = line
        wrap = textwrap.TextWrapper(min(width, _WIDEST), break_long_words=False, break_on_hyphens=False)
        return "\n".join(each if each.startswith(" ") else wrap.fill(each) for each in paragraphs)


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors leave out the usage of every option."""

    def __init__(self, **arguments: Any) -> None:
        self._words: list[str] = []
        super().__init__(formatter_class=_Help, **arguments)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2. An unknown option is named rather than what it was to give."""
        if message.startswith("the following arguments are required") and (
            wrong := self._unknown(self._words)
        ):
            self.unknown(wrong)
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` shows the options and examples\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse. `error` looks at the words, too."""
        self._words = [] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _unknown(self, words: list[str]) -> list[str]:
        """The options among the words that this parser does not have."""
        known = [option for action in self._actions for option in action.option_strings]
        given = [word for word in words if word.startswith("--") and word != "--"]
        return [w for w in given if not any(option.startswith(w.partition("=")[0]) for option in known)]

    def unknown(self, words: list[str]) -> NoReturn:
        """End the program for words that no option takes."""
        word = words[0].partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings]
        near = did_you_mean(word, [option for option in options if option.startswith("--")])
        self.error(f"unknown argument {words[0]!r}{near if word.startswith('-') else ''}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value of an option. The case of one that is chosen from a list does not matter."""
        try:
            value = super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if error.message.startswith("invalid "):  # argparse names a function here
                expected = action.metavar if "|" in str(action.metavar) else "a number"
                raise argparse.ArgumentError(action, f"{arg_string!r} is not {expected}") from None
            raise
        listed = isinstance(value, str) and not isinstance(action, argparse._SubParsersAction)
        choices = (action.choices or ()) if listed else ()
        return next((choice for choice in choices if str(choice).lower() == str(value).lower()), value)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(known)}{near}")
