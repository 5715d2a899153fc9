"""What ranks tell `mpitrain run`, beside all output: that they began, how far they are, that the job is done.

A launcher's exit code does not tell: it may be 0 although a host was lost. So ranks write short marks to their
standard error, which every launcher brings to where the job was started, on the connections it has anyway, and
`mpitrain run` takes them out again. A mark is one line: a control character, the secret of this run, what is told.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.errors import LauncherError
from mpitrain.launch.processes import die_with_parent
from mpitrain.runtime import launcher

RUN_VARIABLE = "MPITRAIN_RUN"  # the secret, for the ranks
OUTPUT_VARIABLE = "MPITRAIN_RUN_OUTPUT"  # the directory in which each rank writes to files of its own
SIGN = b"\x1e"
RESUME_VARIABLE = "MPITRAIN_RUN_RESUME"  # set when a job is started again that has written checkpoints
LONGEST_MARK = 512  # less than what a pipe takes at once, so that marks of several ranks do not mix
PATIENCE_SECONDS = 1.0  # for a launcher that does not read
# What is told, and what stands behind it:
# `begun`: the process.
# `graceful`: a signal is from now on a request to come to an end; `ordinary`: it no longer is.
# `resumed`, `saved`: a checkpoint was read, or is written: after how many steps. `step`: that many are done.
# `fault`: a `ToldFault`. `finished`: the exit code, if known.
# Of ranks that are started one by one: `started` (for the supervisor: on which host), and `ended` with which code;
# `lost`: ssh's exit code, and the host.
EVENTS = (
    *("begun", "met", "graceful", "ordinary", "resumed", "saved", "step", "fault", "finished"),
    *("started", "ended", "lost"),
)
# What taggers of Open MPI, Hydra and srun put before a line.
TAG = re.compile(rb"\s*(?:\[[\d,]+\](?:<stderr>)?:?|\d+:)\s*")


@dataclass(frozen=True)
class Mark:
    """What a rank told.

    Attributes:
        event: one of `EVENTS`.
        rank: whose it is; -1 if it is not known yet.
        host: the name of its host.
        detail: what belongs to the event.
    """

    event: str
    rank: int
    host: str
    detail: str = ""


class Reporter:
    """Tells marks, from one rank.

    Args:
        secret: of this run.
        descriptor: where the launcher listens.

    Attributes:
        exit_code: of this process, where its command has told.
        resumes: the job was started before, and goes on from the newest of its checkpoints.
    """

    def __init__(self, secret: str, descriptor: int) -> None:
        self._secret, self._descriptor = secret, descriptor
        self.exit_code: int | None = None
        self.resumes = False

    def tell(self, event: str, rank: int, detail: object = "") -> None:
        """Local: write a mark; nobody may be listening any more, or the launcher may be stopped."""
        words = " ".join(f"{self._secret} {event} {rank} {os.uname().nodename} {detail}".split())
        with contextlib.suppress(OSError):
            waiting = select.poll()
            waiting.register(self._descriptor, select.POLLOUT)
            if waiting.poll(PATIENCE_SECONDS * 1000):
                os.write(self._descriptor, (SIGN + words.encode())[: LONGEST_MARK - 1] + b"\n")


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
        _redirect(Path(directory), rank)
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


@dataclass(frozen=True)
class ToldFault:
    """What ended a job, as ranks told it.

    Attributes:
        kind: as in `faults.report.Fault`.
        step: that were done before, of the whole training where that is known, else in this process.
        exit_code: of the job.
        place: such as `rank 1 on hosta`.
        reason: the same for two faults of the same cause.
    """

    kind: str
    step: int
    exit_code: int
    place: str
    reason: str

    @property
    def detail(self) -> str:
        """For a mark, where the place is one word. What is too long is cut off, in the same way each time."""
        place, reason = self.place.replace(" ", "~")[:120], self.reason.encode()[:200].decode(errors="ignore")
        return f"{self.kind} {self.step} {self.exit_code} {place} {reason}"

    @classmethod
    def of(cls, detail: str) -> ToldFault | None:
        """What `detail` says; None if it is no such text."""
        words = detail.split(" ", 4)
        if len(words) != 5 or not (words[1].isdecimal() and words[2].lstrip("-").isdecimal()):
            return None
        return cls(words[0], int(words[1]), int(words[2]), words[3].replace("~", " "), words[4])


def own_rank(environ: Mapping[str, str]) -> int:
    """Local: the rank of this process according to its launcher, or -1."""
    found = launcher.detect(environ)
    return -1 if found is None or found.rank is None else found.rank


def directory_of(directory: Path, rank: int) -> Path:
    """Where one rank's `stdout` and `stderr` are, as horovodrun names it."""
    return directory / f"rank.{rank}"


def _redirect(directory: Path, rank: int) -> None:
    own = directory_of(directory, rank)
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
    except OSError as error:
        raise LauncherError(
            f"rank {rank} on {os.uname().nodename} cannot write to {own} ({error.strerror}): "
            "give another --output-filename"
        ) from error


@dataclass
class Listener:
    """Takes the marks out of what ranks write to standard error.

    Attributes:
        secret: of this run.
        marks: those found so far.
    """

    secret: str
    marks: list[Mark] = field(default_factory=list)
    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """The same output, without marks; what may be the beginning of one is kept until more comes.

        Args:
            data: what came next; empty at the end, when nothing is kept.
        """
        text, self._rest = self._rest + data, b""
        shown = bytearray()
        sign = SIGN + self.secret.encode() + b" "
        while text:
            start = text.find(SIGN)
            if start < 0:
                break
            shown += text[:start]
            text = text[start:]
            head = text[: len(sign)]
            end = text.find(b"\n")
            if sign.startswith(head) and end < 0 and len(text) <= LONGEST_MARK and data:
                self._rest = text
                text = b""
            elif text.startswith(sign) and end >= 0:
                self._take(text[len(sign) : end])
                text = text[end + 1 :]
                shown = shown[: self._untagged(shown)]
            else:
                shown += text[:1]
                text = text[1:]
        return bytes(shown + text)

    def _untagged(self, shown: bytearray) -> int:
        """Where the tag of a line begins that held nothing but a mark."""
        line = shown.rfind(b"\n") + 1
        return line if TAG.fullmatch(shown, line) else len(shown)

    def _take(self, words: bytes) -> None:
        parts = words.decode(errors="replace").split(None, 3)
        if len(parts) >= 3 and parts[0] in EVENTS and parts[1].lstrip("-").isdecimal():
            self.marks.append(Mark(parts[0], int(parts[1]), *parts[2:]))

    @property
    def is_graceful(self) -> bool:
        """Whether the ranks come to an end by themselves when they get a signal."""
        told = [mark.event for mark in self.marks if mark.event in ("graceful", "ordinary")]
        return told[-1:] == ["graceful"]

    @property
    def fault(self) -> ToldFault | None:
        """What ranks told first that ends the job."""
        told = (ToldFault.of(mark.detail) for mark in self.marks if mark.event == "fault")
        return next((fault for fault in told if fault is not None), None)

    def connections(self) -> list[tuple[str, int]]:
        """The hosts to which starters of ranks have lost the connection, and ssh's exit codes."""
        told = [mark.detail.partition(" ") for mark in self.marks if mark.event == "lost"]
        return [(host, int(code)) for code, _, host in told if code.lstrip("-").isdecimal()]

    def hosts(self) -> set[str]:
        """The hosts on which ranks have begun, or were started."""
        begun = set(self.ranks("begun").values())
        return begun | {mark.detail for mark in self.marks if mark.event == "started" and mark.detail}

    def numbers(self, event: str) -> list[int]:
        """The numbers that were told with an event."""
        return [int(mark.detail) for mark in self.marks if mark.event == event and mark.detail.isdecimal()]

    def ranks(self, event: str) -> dict[int, str]:
        """The ranks that told an event, and their hosts."""
        return {mark.rank: mark.host for mark in self.marks if mark.event == event}
