"""Every exception mpitrain raises, in one tree.

A message says what happened, on which ranks, what was expected, and how to mend it.
`exit_code` is what the command line exits with when the error reaches it.
"""

from __future__ import annotations

import re
import runpy
import textwrap
import traceback
from pathlib import Path

LONGEST = 300  # characters of what another library says, within a sentence of ours
# What Keras and TensorFlow put into messages for terminals, and for themselves.
ORNAMENTS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\{\{[^{}]*\}\}|\[Op:[^\]]*\](?: name:\s*)?")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PACKAGE = str(Path(__file__).parent)
COMMAND = f"{PACKAGE}/cli/main.py"  # called by a program that Python's installers have written
CALLERS = (f"{PACKAGE}/", "<frozen importlib", "<frozen runpy>", str(Path(runpy.__file__)))


class MpitrainError(Exception):
    """Base of all errors raised by mpitrain."""

    exit_code = 1
    ag_pass_through = True  # AutoGraph leaves it as it is, instead of writing a traceback into its message


class UsageError(MpitrainError):
    """The user asked for something that cannot be done: one clear sentence, no traceback."""

    exit_code = 2


class AgreedError(UsageError):
    """A usage error that every rank has been told of: one prints it, and all leave with its exit code."""

    speaks: bool | None = None  # this rank prints it; None: rank 0 of the job does
    reason: str | None = None  # without what to do about it, where that is wanted


class DataError(UsageError):
    """Training data is missing, unreadable, ragged, or does not fit the model."""


class ModelError(UsageError):
    """A model cannot be built, loaded, or does not fit the data."""


class DeviceError(UsageError):
    """Ranks and accelerators cannot be matched as asked."""


class LauncherError(UsageError):
    """The launcher and MPI disagree about the job (two MPIs mixed, PMI not spoken)."""


class TooLateError(UsageError):
    """A process-wide setting was asked for after TensorFlow had already fixed it."""


class CollectiveError(MpitrainError):
    """A collective operation cannot be completed by all ranks."""


class MismatchError(CollectiveError):
    """Ranks called different collectives, or the same with different arguments."""


class RankFinishedError(CollectiveError):
    """Some ranks have finished while others wait for them in a collective."""


class RankLostError(CollectiveError):
    """A rank of the job has died; the others can go on without it, or end."""


class TooFewRanksError(CollectiveError):
    """Fewer ranks are left than the job is to go on with."""


class NonFiniteError(MpitrainError):
    """A loss or a gradient is infinite, or not a number."""


class ReplicaError(MpitrainError):
    """Variables that must be identical on all ranks differ."""


def in_one_line(failure: BaseException) -> str:
    """Local: what an exception of somebody else's says, to stand within a sentence; long ones end with `...`."""
    words = ORNAMENTS.sub(" ", str(failure))
    text = textwrap.shorten(words, LONGEST, placeholder=" ...") if " " in words.strip()[:LONGEST] else words[:LONGEST]
    return text.strip() or type(failure).__name__


def own_lines(failure: BaseException, keep: bool = False) -> str:
    """Local: the traceback of an exception in code of the user's, without the lines of this package that called it.

    With `keep` those stay where there are no others.
    """
    told = traceback.TracebackException.from_exception(failure)
    before = next((place for place, frame in enumerate(told.stack) if frame.filename == COMMAND), 0)
    own = next((place for place, frame in enumerate(told.stack) if place >= before and not _calls(frame)), None)
    del told.stack[: 0 if own is None and keep else own]
    return COLOURS.sub("", "".join(told.format())).rstrip()


def _calls(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(CALLERS) or Path(frame.filename).parent.name == "importlib"
