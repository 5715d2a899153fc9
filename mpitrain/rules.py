"""What one option may be, and the checks that follow from that."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from mpitrain.errors import UsageError

KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Rule:
    """What one option may be.

    Attributes:
        help: its line on the command line.
        kind: int, float, str or bool.
        choices: the values it may have; () for any.
        least: smallest value.
        below: first value that is too large.
        positive: zero is too small.
        pattern: what a text must match, and how to say so.
        metavar: placeholder on the command line.
        needs: other options without which it would do nothing, and the values they may have; none for any.
        incidental: the numbers of a training do not depend on it.
    """

    help: str
    kind: type
    choices: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None
    positive: bool = False
    pattern: tuple[str, str] | None = None
    metavar: str | None = None
    needs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    incidental: bool = False


ALL_REDUCE = (("strategy", ("all-reduce",)),)
SERVERS = (("strategy", ("ps",)),)
ASYNCHRONOUS = (*SERVERS, ("mode", ("async",)))
CHECKPOINTS = (("checkpoint_dir", ()),)
GPUS = (("device", ("gpu", "auto")),)


def option(default: Any, kind: type, text: str, **rules: Any) -> Any:
    """Local: a field of `TrainConfig`: its default, and the `Rule` made of the rest."""
    return field(default=default, metadata={"rule": Rule(text, kind, **rules)})


def flag(name: str) -> str:
    """Local: an option as the command line has it."""
    return "--" + name.replace("_", "-")


def convert(name: str, rule: Rule, value: Any) -> Any:
    """Local: `value` as the option's kind; whole numbers do for numbers, texts for anything but flags.

    Raises:
        UsageError: it cannot be.
    """
    if rule.kind is bool or rule.kind is str:
        fits = isinstance(value, rule.kind)
    else:
        fits = isinstance(value, int | float | str) and not isinstance(value, bool)
    if rule.kind is int and isinstance(value, float):
        fits = False
    try:
        if fits:
            return rule.kind(value)
    except ValueError:
        pass
    raise UsageError(f"{name} is {value!r}: give {KINDS[rule.kind]}")


def check(name: str, rule: Rule, value: Any) -> None:
    """Local: whether an option may have a value.

    Raises:
        UsageError: it may not.
    """
    if rule.choices and value not in rule.choices:
        raise UsageError(f"{name} is {value!r}: choose one of {', '.join(rule.choices)}")
    if rule.pattern and not re.fullmatch(rule.pattern[0], value):
        raise UsageError(f"{name} is {value!r}: write it {rule.pattern[1]}")
    if rule.kind is str and not value.strip():
        raise UsageError(f"{name} is empty: leave it out, or give a value")
    if rule.kind is str and "\0" in value:
        raise UsageError(f"{name} is {value!r}: leave the NUL character out, which no file name may have")
    if rule.kind in (int, float):
        _check_range(name, rule, value)


def _check_range(name: str, rule: Rule, value: float) -> None:
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}: give a finite number")
    if rule.positive and value <= 0:
        raise UsageError(f"{name} is {value}: it must be above 0")
    if rule.least is not None and value < rule.least:
        raise UsageError(f"{name} is {value}: it must be at least {rule.least:g}")
    if rule.below is not None and value >= rule.below:
        raise UsageError(f"{name} is {value}: it must be below {rule.below:g}")
