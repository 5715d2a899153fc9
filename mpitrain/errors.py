"""Every exception mpitrain raises, in one tree.

A message says what happened, on which ranks, what was expected, and how to mend it.
`exit_code` is what the command line exits with when the error reaches it.
"""

from __future__ import annotations


class MpitrainError(Exception):
    """Base of all errors raised by mpitrain."""

    exit_code = 1


class UsageError(MpitrainError):
    """The user asked for something that cannot be done: one clear sentence, no traceback."""

    exit_code = 2


class AgreedError(UsageError):
    """A usage error that every rank has been told of: one prints it, and all leave with its exit code.

    Attributes:
        speaks: this rank prints it; None: rank 0 of the job does.
    """

    speaks: bool | None = None


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
