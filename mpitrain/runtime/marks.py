"""What ranks tell `mpitrain run`, beside all output: that they began, how far they are, that the job is done.

A launcher's exit code does not tell: it may be 0 although a host was lost. So ranks write short marks to their
standard error, which every launcher brings to where the job was started, on the connections it has anyway, and
`mpitrain run` takes them out again. A mark is one line: a control character, the secret of this run, what is told.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from mpitrain.runtime import output_files
from mpitrain.runtime.launcher import own_rank
from mpitrain.runtime.output_files import OUTPUT_VARIABLE
from mpitrain.runtime.process_tree import die_with_parent

RUN_VARIABLE = "MPITRAIN_RUN"  # the secret, for the ranks
RESUME_VARIABLE = "MPITRAIN_RUN_RESUME"  # set when a job is started again that has written checkpoints
SIGN = b"\x1e"
LONGEST_MARK = 512  # less than what a pipe takes at once, so that marks of several ranks do not mix
PATIENCE_SECONDS = 1.0  # for a launcher that does not read
# What is told, and what stands behind it:
# `begun`: the process.
# `graceful`: a signal is from now on a request to come to an end; `ordinary`: it no longer is.
# `resumed`, `saved`: a checkpoint was read, or is written: after how many steps. `step`: that many are done.
# `fault`: a `FaultSummary`. `finished`: the exit code, if known.
# Of ranks that are started one by one: `started` (for the supervisor: on which host), and `ended` with which code;
# `lost`: ssh's exit code, and the host.
EVENTS = (
    *("begun", "met", "graceful", "ordinary", "resumed", "saved", "step", "fault", "finished"),
    *("started", "ended", "lost"),
)


@dataclass(frozen=True)
class Mark:
    """What a rank told."""

    event: str  # one of `EVENTS`
    rank: int  # whose it is; -1 if it is not known yet
    host: str  # the name of its host
    detail: str = ""  # what belongs to the event


class Reporter:
    """Tells marks, from one rank.

    Args:
        secret: of this run.
        descriptor: where the launcher listens.
    """

    def __init__(self, secret: str, descriptor: int) -> None:
        self._secret, self._descriptor = secret, descriptor
        self.exit_code: int | None = None  # of this process, where its command has told
        self.resumes = False  # the job was started before, and goes on from the newest of its checkpoints

    def tell(self, event: str, rank: int, detail: object = "") -> None:
        """Local: write a mark; nobody may be listening any more, or the launcher may be stopped."""
        words = " ".join(f"{self._secret} {event} {rank} {os.uname().nodename} {detail}".split())
        with contextlib.suppress(OSError):
            waiting = select.poll()
            waiting.register(self._descriptor, select.POLLOUT)
            if waiting.poll(PATIENCE_SECONDS * 1000):
                os.write(self._descriptor, (SIGN + words.encode(errors="backslashreplace"))[: LONGEST_MARK - 1] + b"\n")


@functools.cache
def reporter() -> Reporter | None:
    """Local: of this process, if `mpitrain run` started it as a rank.

    The first call takes the variables out of the environment, so that programs which the rank starts do not
    take themselves for ranks, and lets the rank write to files of its own where that was asked for.

    Raises:
        LauncherError: there can be no such files.
    """
    secret, directory, resume = (os.environ.pop(name, "") for name in (RUN_VARIABLE, OUTPUT_VARIABLE, RESUME_VARIABLE))
    if not secret:
        return None
    # A daemon of the launcher that ends without a word leaves no rank behind.
    die_with_parent(signal.SIGKILL)
    found = Reporter(secret, os.dup(2))
    found.resumes = bool(resume)
    rank = own_rank(os.environ)
    if directory and rank > 0:
        output_files.redirect(Path(directory), rank)
    return found


def tell(event: str, rank: int | None = None, detail: object = "") -> None:
    """Local: write a mark, if anybody waits for it. The first call in a process may raise as `reporter` does.

    Args:
        event: one of `EVENTS`.
        rank: of this process; else what the launcher says.
        detail: what belongs to the event; words in one line, of which the end may be cut off.
    """
    teller = reporter()
    if teller is not None:
        teller.tell(event, own_rank(os.environ) if rank is None else rank, detail)


def finished(rank: int) -> None:
    """Local: tell that all ranks have come to the end of their programs, and with which exit code, if that is known."""
    teller = reporter()
    if teller is not None:
        teller.tell("finished", rank, "" if teller.exit_code is None else teller.exit_code)


def note_exit(status: object) -> None:
    """Local: this process is about to end with what `sys.exit` takes."""
    teller = reporter()
    if teller is not None:
        teller.exit_code = 0 if status is None else status if isinstance(status, int) else 1
