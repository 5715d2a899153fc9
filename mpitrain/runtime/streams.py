"""Where the output of this process goes: on ranks whose words nobody needs twice, into a file."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

_kept: list[int] = []  # at most one: standard error as it was, where it leads elsewhere now


def terminal() -> int:
    """Local: the descriptor for what users must see whatever becomes of this process's output."""
    return _kept[0] if _kept else 2


def write_stderr(text: str) -> None:
    """Local: print to standard error, in one piece, whatever becomes of the other output of this process."""
    with contextlib.suppress(OSError):
        os.write(terminal(), text.encode(errors="backslashreplace"))  # names of files need not be UTF-8


def flush() -> None:
    """Local: what Python still holds of the output goes out; a program may have closed or removed its streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def open_all() -> None:
    """Local: what was closed leads nowhere from now on, or the next file or socket would become standard output."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if not _is_open(descriptor):
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(nowhere, "w" if descriptor else "r", closefd=False))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def take_all_letters() -> None:
    """Local: names of files and classes can be printed, also those that the encoding of standard output lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def lead_to(log: TextIO) -> None:
    """Local: all output goes to `log` from now on, also that of native code and of programs started from here.

    Crashes in native code are still shown on the terminal.
    """
    flush()
    _kept[:] = [os.dup(2)]
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    if faulthandler.is_enabled():
        faulthandler.enable(file=_kept[0], all_threads=False)


@contextlib.contextmanager
def held_back(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Local: standard error comes at the end of this context, but for lines that begin with `noise`.

    What must be seen at once goes to `terminal`.
    """
    before, kept = list(_kept), os.dup(2)
    memory = os.memfd_create("standard error")
    _kept[:] = before or [kept]
    os.dup2(memory, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        _kept[:] = before
        os.close(kept)
        told = os.pread(memory, os.fstat(memory).st_size, 0)
        os.close(memory)
        os.write(2, b"".join(line for line in told.splitlines(keepends=True) if not noise.match(line)))
