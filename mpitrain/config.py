"""Options: what each may be, where its value may come from, and the checks that follow from that.

An option is written once: as a field, made by `option`, of the dataclass of the room that it belongs to. Command line,
TOML files, environment variables and messages follow from it. A dataclass takes the options of another one by a field
made by `room` (an object of that class) or `given_of` (those that were given, by their names).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from mpitrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Room = TypeVar("Room")
KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
MOST = 10**9  # more is a slip of the pen, and beyond what the libraries count with


@dataclass(frozen=True)
class Option:
    """What one option may be."""

    help: str  # its line on the command line
    kind: type = str  # int, float, str or bool: the type of the field
    default: Any = None  # where it is given nowhere
    name: str = ""  # on the command line and in files; that of the field by default
    # those of the commands with its table that take it, and `init` for the argument of that name; () where only the
    # class takes it; None for all of them
    commands: tuple[str, ...] | None = None
    variable: bool = False  # an environment variable is read where it is not given
    choices: tuple[str, ...] = ()  # the values it may have; () for any
    least: float | None = None  # smallest value
    below: float | None = None  # first value that is too large
    positive: bool = False  # zero is too small
    pattern: tuple[str, str] | None = None  # what a text must match, and how to say so
    metavar: str | None = None  # placeholder on the command line
    aliases: tuple[str, ...] = ()  # other flags on the command line
    # other options without which it would do nothing, and the values they may have; none for any
    needs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    incidental: bool = False  # the numbers of a training do not depend on it

    @property
    def flag(self) -> str:
        """As the command line has it."""
        return flag(self.name)

    @property
    def environment(self) -> str | None:
        """The environment variable, where there is one."""
        return variable(self.name) if self.variable else None

    @property
    def label(self) -> str:
        """For messages, where it is not known from where its value came."""
        if self.environment is None:
            return self.flag
        return self.environment if self.commands == () else f"{self.flag} ({self.environment})"


def option(default: Any, text: str, **rules: Any) -> Any:
    """Local: a field of a dataclass: its default, and an `Option` of the rest and of the field's type and name."""
    return field(default=default, metadata={"option": Option(text, default=default, **rules)})


def room(kind: type, **rules: Any) -> Any:
    """Local: a field of a dataclass that holds the options of another one; `rules` are what all of these need."""
    return field(default_factory=kind, metadata={"room": kind, "defaults": {}, "rules": rules})


def given_of(kind: type, defaults: Mapping[str, Any] | None = None, **rules: Any) -> Any:
    """Local: a field that holds, by name, those options of another dataclass that were given, or have `defaults`."""
    told = dict(defaults or {})
    return field(default_factory=lambda: told, metadata={"room": kind, "defaults": told, "rules": rules, "given": True})


def flag(name: str) -> str:
    """Local: an option as the command line has it."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Local: the environment variable of an option."""
    return f"MPITRAIN_{name.upper()}"


@functools.cache
def options(kind: type, command: str | None = None) -> dict[str, Option]:
    """Local: the options of a dataclass and of those in its fields, by their names.

    With a command only those that it takes.
    """
    found: dict[str, Option] = {}
    for item in dataclasses.fields(kind):
        if "room" in item.metadata:
            defaults, rules = item.metadata["defaults"], item.metadata["rules"]
            for name, one in options(item.metadata["room"], command).items():
                told = {**rules, "needs": (*rules.get("needs", ()), *one.needs)}
                found[name] = dataclasses.replace(one, default=defaults.get(name, one.default), **told)
        elif "option" in item.metadata:
            one = own_options(kind)[item.name]
            if command is None or one.commands is None or command in one.commands:
                found[one.name] = one
    return found


@functools.cache
def own_options(kind: type) -> dict[str, Option]:
    """Local: the options of a dataclass without those of others, by the names of its fields."""
    hints = get_type_hints(kind)
    return {
        item.name: dataclasses.replace(
            item.metadata["option"],
            name=item.metadata["option"].name or item.name,
            kind=next((one for one in KINDS if one in (hints[item.name], *get_args(hints[item.name]))), str),
        )
        for item in dataclasses.fields(kind)
        if "option" in item.metadata
    }


def build(kind: type[Room], found: Mapping[str, Any]) -> Room:
    """Local: an object of the dataclass.

    More values than are its own do no harm.
    """
    table: type = kind
    arguments = {name: found[one.name] for name, one in own_options(table).items() if one.name in found}
    for item in dataclasses.fields(table):
        if "given" in item.metadata:
            given = {name: found[name] for name in options(item.metadata["room"]) if name in found}
            arguments[item.name] = {**item.metadata["defaults"], **given}
        elif "room" in item.metadata:
            arguments[item.name] = build(item.metadata["room"], found)
    return kind(**arguments)


def values(chosen: Any) -> dict[str, Any]:
    """Local: the value of each option of an object, by its name."""
    kind: type = type(chosen)
    found = {one.name: getattr(chosen, name) for name, one in own_options(kind).items()}
    for item in dataclasses.fields(chosen):
        if "room" in item.metadata:
            value = getattr(chosen, item.name)
            found |= value if "given" in item.metadata else values(value)
    return found


def check_values(chosen: Any) -> None:
    """Local: whether the options of an object may have the values that they have; its rooms look for themselves.

    Raises:
        UsageError: one may not.
    """
    kind: type = type(chosen)
    for name, one in own_options(kind).items():
        if getattr(chosen, name) is not None:
            check(name, one, getattr(chosen, name))


def check_needs(chosen: Any, given: Collection[str]) -> None:
    """Local: whether every option that was given can act.

    What an option needs that `chosen` has not is not looked at.

    Raises:
        UsageError: one would do nothing, since another option is not as it needs it.
    """
    found = values(chosen)
    kind: type = type(chosen)
    for name, one in options(kind).items():
        for other, wanted in one.needs if name in given else ():
            if other in found and (found[other] is None or (wanted and found[other] not in wanted)):
                needed = f"{flag(other)} {' or '.join(wanted)}".rstrip()
                raise UsageError(f"{flag(name)} does nothing without {needed}: give that, too, or leave it out")


def from_environment(kind: type, environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Local: options that are given, and not None, before environment variables, converted and checked.

    Raises:
        UsageError: one has a value that it may not have.
    """
    found: dict[str, Any] = {}
    for name, one in options(kind).items():
        value = given.get(name)
        if value is None and one.environment is not None:
            value = environ.get(one.environment) or None
        if value is not None:
            found[name] = read(one.label, one, value)
    return found


def from_file(written: Mapping[str, Any], source: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """Local: the options of a file, converted and checked.

    Raises:
        UsageError: an option does not exist, stands there twice, or has a value that it may not have.
    """
    found: dict[str, Any] = {}
    for spelling, value in written.items():
        name = spelling.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "mpitrain --help names all options"
            raise UsageError(f"there is no option {spelling!r} in {source}: {hint}")
        if name in found:
            raise UsageError(f"{spelling} stands twice in {source}, in two spellings: leave one out")
        found[name] = read(f"{spelling} in {source}", known[name], value)
    return found


def read_file(path: Path) -> dict[str, Any]:
    """Local: what stands in a TOML file.

    Raises:
        UsageError: the file is missing or is not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read ({error.strerror}): correct the path") from error
    except (ValueError, RecursionError) as error:  # of TOML, or of UTF-8; or brackets in thousands of brackets
        raise UsageError(f"the configuration {path} is not TOML ({error}): write lines such as epochs = 5") from error


def read(name: str, one: Option, value: Any) -> Any:
    """Local: `value` as the option's kind; whole numbers do for numbers, texts for anything but flags.

    Raises:
        UsageError: it cannot be, or is none that the option may have.
    """
    if one.kind is bool or one.kind is str:
        fits = isinstance(value, one.kind)
    else:
        fits = isinstance(value, int | float | str) and not isinstance(value, bool)
    if one.kind is int and isinstance(value, float):
        fits = False
    try:
        if fits:
            found = one.kind(value)
            check(name, one, found)
            return found
    except ValueError:
        pass
    unit = f" of {one.metavar.lower()}" if one.kind is float and one.metavar else ""
    raise UsageError(f"{name} is {value!r}: give {KINDS[one.kind]}{unit}")


def check(name: str, one: Option, value: Any) -> None:
    """Local: whether an option may have a value.

    Raises:
        UsageError: it may not.
    """
    if one.choices and value not in one.choices:
        raise UsageError(f"{name} is {value!r}: choose one of {', '.join(one.choices)}")
    if one.pattern and not re.fullmatch(one.pattern[0], value):
        raise UsageError(f"{name} is {value!r}: write it {one.pattern[1]}")
    if one.kind is str and not value.strip():
        raise UsageError(f"{name} is empty: leave it out, or give a value")
    if one.kind is str and "\0" in value:
        raise UsageError(f"{name} is {value!r}: leave the NUL character out, which no file name may have")
    if one.kind in (int, float):
        _check_range(name, one, value)


def _check_range(name: str, one: Option, value: float) -> None:
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}: give a finite number")
    if one.positive and value <= 0:
        raise UsageError(f"{name} is {value}: it must be above 0")
    if one.least is not None and value < one.least:
        raise UsageError(f"{name} is {value}: it must be at least {one.least:g}")
    if one.below is not None and value >= one.below:
        raise UsageError(f"{name} is {value}: it must be below {one.below:g}")
