"""Which way gradients are exchanged: what the user asks for, and whether that can be, before TensorFlow is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.comm.communicator import Communicator
from mpitrain.comm.mpi import MpiCommunicator
from mpitrain.errors import UsageError
from mpitrain.native.library import loadable

VARIABLE = "MPITRAIN_ENGINE"
AUTO, NATIVE, PYTHON = WAYS = ("auto", "native", "python")


def asked(environ: Mapping[str, str]) -> str:
    """Local: one of WAYS.

    Raises:
        UsageError: the variable says something else.
    """
    way = environ.get(VARIABLE, AUTO)
    if way not in WAYS:
        raise UsageError(f"{VARIABLE} is {way!r}: choose one of {', '.join(WAYS)}")
    return way


def obstacle(communicator: Communicator) -> str | None:
    """Local: why machine code cannot exchange between these ranks, as far as that is known without TensorFlow."""
    if not isinstance(communicator, MpiCommunicator):
        return "no MPI connects these ranks"
    if communicator.thread_level != "multiple":
        return f"this MPI lets no other thread in (its level is {communicator.thread_level})"
    return loadable(communicator.file)


def check(communicator: Communicator, environ: Mapping[str, str]) -> None:
    """Local: whether what is asked for can be.

    Raises:
        UsageError: it cannot.
    """
    if asked(environ) == NATIVE and communicator.size > 1:
        reason = obstacle(communicator)
        if reason is not None:
            raise unusable(reason)


def unusable(reason: str) -> UsageError:
    """Local: what is told where machine code is insisted on."""
    return UsageError(f"{VARIABLE}={NATIVE}, but gradients cannot be exchanged by machine code: {reason}")
