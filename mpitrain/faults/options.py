"""What is watched, and for how long: from arguments, else from the environment, else defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import UsageError

STALL_EXIT_CODE = 75
NON_FINITE = ("stop", "warn", "ignore")
COMPARE_RANKS = ("stop", "warn", "ignore")
SAME_DATA = ("warn", "ignore")
ABORT, SHRINK = ON_FAILURE = ("abort", "shrink")
CHOICES = {"non_finite": NON_FINITE, "same_data": SAME_DATA, "compare_ranks": COMPARE_RANKS, "on_failure": ON_FAILURE}


@dataclass(frozen=True)
class FaultOptions:
    """How faults are dealt with.

    Attributes:
        stall_warning: seconds that a rank waits for others until it is told who has not come; 0 for never.
        stall_abort: seconds that a rank waits until the job ends with exit code 75; 0 for never.
        non_finite: what to do when the loss or a mean gradient is not finite.
        same_data: what to do when ranks read the same batches.
        compare_ranks: what to do when ranks run other code, packages or arguments.
        on_failure: when a rank dies: end the job, or let the others go on without it.
        min_np: with how many ranks the job goes on at least.
        failure_report: file that each fault is added to as a line of JSON; None for none.
    """

    stall_warning: float = 30.0
    stall_abort: float = 300.0
    non_finite: str = "warn"
    same_data: str = "warn"
    compare_ranks: str = "stop"
    failure_report: str | None = None
    on_failure: str = ABORT
    min_np: int = 1

    @classmethod
    def of(cls, environ: Mapping[str, str], **given: Any) -> FaultOptions:
        """Local: arguments that are not None before variables such as MPITRAIN_STALL_WARNING before defaults.

        Raises:
            UsageError: a value is not one of those it may be.
        """
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name in ("stall_warning", "stall_abort"):
            values[name] = _seconds(name, values.get(name, environ.get(variable(name))), getattr(cls, name))
        for name, choices in CHOICES.items():
            value = values.get(name, environ.get(variable(name)) or getattr(cls, name))
            if value not in choices:
                raise UsageError(f"{_names(name)} is {value!r}: choose one of {', '.join(choices)}")
            values[name] = value
        if "min_np" in values and values["on_failure"] != SHRINK:
            raise UsageError("--min-np does nothing without --on-failure shrink: give that, too, or leave it out")
        values["min_np"] = _count("min_np", values.get("min_np", environ.get(variable("min_np"))), cls.min_np)
        values.setdefault("failure_report", environ.get(variable("failure_report")) or None)
        return cls(**values)

    @classmethod
    def patience(cls, environ: Mapping[str, str], **given: float | None) -> FaultOptions:
        """Local: the limits of stalls where they are told rightly, else the defaults; what is wrong is told by `of`."""
        try:
            return cls.of(environ, **given)
        except UsageError:
            return cls()


def variable(name: str) -> str:
    """Local: the environment variable of an option."""
    return f"MPITRAIN_{name.upper()}"


def _names(name: str) -> str:
    return f"--{name.replace('_', '-')} ({variable(name)})"


def _seconds(name: str, value: Any, default: float) -> float:
    if value is None or value == "":
        return default
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{_names(name)} is {value!r}: give seconds, or 0 for never")
    return seconds


def _count(name: str, value: Any, default: int) -> int:
    if value is None or value == "":
        return default
    if not str(value).isdecimal() or int(value) < 1:
        raise UsageError(f"{_names(name)} is {value!r}: give a number of ranks, at least 1")
    return int(value)
