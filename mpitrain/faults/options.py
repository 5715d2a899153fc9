"""What is watched, and for how long: from arguments, else from the environment, else defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain.config import MOST, build, check_needs, from_environment, option
from mpitrain.errors import UsageError
from mpitrain.runtime.exit_codes import STALLED

ABORT, SHRINK = ON_FAILURE = ("abort", "shrink")


@dataclass(frozen=True)
class FaultOptions:
    """How faults are dealt with."""

    stall_warning: float = option(
        30.0, "tell who has not come when a rank has waited so long; 0 never", least=0, metavar="SECONDS", variable=True
    )
    stall_abort: float = option(
        300.0, f"then end the job, with exit code {STALLED}; 0 never", least=0, metavar="SECONDS", variable=True
    )
    non_finite: str = option(
        "warn",
        "what to do at a loss or mean gradient that is not finite",
        choices=("stop", "warn", "ignore"),
        variable=True,
        commands=("init", "train", "script"),
    )
    on_failure: str = option(
        ABORT,
        "when a rank dies: end the job, or shrink: go on without it",
        choices=ON_FAILURE,
        variable=True,
        commands=("init", "train"),
    )
    min_np: int = option(
        1,
        "with how many ranks to go on at least",
        least=1,
        below=MOST,
        variable=True,
        commands=("init", "train"),
        needs=(("on_failure", (SHRINK,)),),
    )
    same_data: str = option(
        "warn", "what to do when ranks read the same batches", choices=("warn", "ignore"), variable=True, commands=()
    )
    compare_ranks: str = option(
        "stop",
        "what to do when ranks run other code, packages or arguments",
        choices=("stop", "warn", "ignore"),
        variable=True,
        commands=(),
    )
    failure_report: str | None = option(
        None, "file that each fault is added to, as a line of JSON", metavar="FILE", variable=True, commands=()
    )

    @classmethod
    def of(cls, environ: Mapping[str, str], **given: Any) -> FaultOptions:
        """Local: arguments that are not None before variables such as MPITRAIN_STALL_WARNING before defaults.

        Raises:
            UsageError: a value is not one of those it may be, or does not fit another.
        """
        found = build(cls, from_environment(cls, environ, given))
        check_needs(found, [name for name, value in given.items() if value is not None])
        if 0 < found.stall_abort < found.stall_warning:
            raise UsageError(
                f"--stall-abort {found.stall_abort:g} would end the job before --stall-warning "
                f"{found.stall_warning:g} tells who has not come: give --stall-warning a smaller number, or 0 for never"
            )
        return found

    @classmethod
    def patience(cls, environ: Mapping[str, str], **given: float | None) -> FaultOptions:
        """Local: the limits of stalls where they are told rightly, else the defaults; what is wrong is told by `of`."""
        try:
            return cls.of(environ, **given)
        except UsageError:
            return cls()
