"""Arguments of commands: parsers made of tables of options, and whose a word is."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mpitrain.config import Option, read
from mpitrain.errors import UsageError
from mpitrain.runtime.launcher import detect

MOST_SHOWN = 4  # choices; more are named in the help


class Parser(argparse.ArgumentParser):
    """Arguments of one command: errors in one sentence, help from rank 0 only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def add_options(self, options: Mapping[str, Option], others: Mapping[str, str] | None = None) -> None:
        """Local: take the options of a table. What is not given is no attribute of the arguments.

        `others` is more on the defaults of some, for options that a file may hold, too: switches can be turned off.
        """
        for name, one in options.items():
            flags = (*one.aliases, one.flag)
            rules: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            if one.kind is bool:
                rules["action"] = "store_true" if others is None else argparse.BooleanOptionalAction
            else:
                rules |= {"type": functools.partial(read, "/".join(flags), one), "metavar": _metavar(one)}
            self.add_argument(*flags, help=_help(one, (others or {}).get(name)), **rules)

    def divide(self, words: Sequence[str], *, unknown: bool = True) -> tuple[list[str], list[str]]:
        """Local: the options at the beginning, with their values, and what follows.

        With `unknown`, an option that this parser does not know counts as one, without a value.
        """
        takes_value = {flag: one.nargs != 0 for one in self._actions for flag in one.option_strings}
        index = 0
        while index < len(words):
            option, _, value = words[index].partition("=")
            if option in ("-m", "--") or not option.startswith("-") or not (unknown or option in takes_value):
                break
            index += 2 if takes_value.get(option) and not value else 1
        return list(words[:index]), list(words[index:])

    def flags(self) -> list[str]:
        """Local: all options that it knows."""
        parsers = [
            one for action in self._actions if isinstance(action.choices, dict) for one in action.choices.values()
        ]
        return [*self._option_string_actions, *(flag for parser in parsers for flag in parser.flags())]

    def error(self, message: str) -> NoReturn:
        """Local: raise instead of printing.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        launcher = detect(os.environ)
        if launcher is None or launcher.rank in (None, 0):
            super()._print_message(message, file)


def _metavar(one: Option) -> str | None:
    if one.choices:
        return "{" + ",".join(one.choices) + "}" if len(one.choices) <= MOST_SHOWN else "NAME"
    return one.metavar or {int: "N", float: "X"}.get(one.kind)


def _help(one: Option, more: str | None) -> str:
    text = one.help if len(one.choices) <= MOST_SHOWN else f"{one.help}: {', '.join(one.choices)}"
    shown = f"{one.default:g}" if isinstance(one.default, float) else one.default
    default = [] if shown is None or shown is False else [f"default {shown}"]
    told = [*default, *([more] if more else [])]
    return f"{text} ({'; '.join(told)})" if told else text
