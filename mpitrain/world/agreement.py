"""All ranks say what they are about to do before they do it.

MPI pairs collectives by order alone: ranks that call different ones, or the same with other
counts, hang or get wrong sums (seen: Open MPI 5, one rank wrong, no error). Before each
collective every rank therefore gathers one small header of each rank. It tells

- what is called (the signature of a `Call`): a difference raises on every rank;
- how many samples stand behind this rank's gradient, so that the mean can be exact;
- which ranks have run out of data (`joining`) or reached the end of the program (`finished`):
  they contribute zero to the updates of the others, and nobody waits for them for ever;
- what a rank wants the others to know (a signal has come, a checkpoint is due);
- three numbers for the progress display. Both travel for free.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator
from mpitrain.errors import MismatchError, RankFinishedError
from mpitrain.runtime.words import Word
from mpitrain.world.calls import Call, Meeting, meeting

CONTENDED, JOINING, FINISHED = -1, 0, 1
THREADS = (
    "call collectives at the same time, and other ranks may call them in another order: call them from one thread, or "
    "one after the other."
)
REPORTS = 3
TURN_SECONDS = 2e-4  # between two looks whether machine code has given the turn back
IDLE = {JOINING: Meeting("waiting for the others (out of data)"), FINISHED: Meeting("at the end of the program")}
Able = Callable[[Call], float | None]


@dataclass(frozen=True)
class Agreed:
    """What the headers of one collective said."""

    # (size,) float64, samples behind each rank's contribution; 0 for idle ranks
    samples: np.ndarray[tuple[int], np.dtype[np.float64]]
    # (size, REPORTS) float64, each rank's last reported numbers
    reports: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    requests: np.ndarray[tuple[int], np.dtype[np.float64]]  # (size,) float64, each rank's `Agreement.request`
    active: np.ndarray[tuple[int], np.dtype[np.bool_]]  # (size,) bool, False for ranks that are joining or finished
    finished: bool = False  # every rank is at the end of its program
    possible: bool = True  # all idle ranks can take part in what the active ones call
    call: Call | None = None  # what the active ranks call, where some rank is idle


class Observer(Protocol):
    """What wants to know of collectives; times are those of `time.perf_counter`."""

    def agreed(self, call: Call, start: float, end: float) -> None:
        """Local: this rank called a collective at `start`, and at `end` all ranks had come to it."""
        ...

    def ended(self) -> None:
        """Local: the collective agreed on last, or one bucket of it, has ended on this rank."""
        ...


class Turn:
    """Held by one thread of this rank during a collective, with all that belongs to it.

    Threads that call collectives at the same time may do so in another order on another rank. So they are refused.

    Attributes:
        contended: a thread has had to wait for another one.
    """

    _taken = Word(0, int)  # by machine code or by Python
    contended = Word(1, bool)
    observed = Word(2, bool)  # somebody wants to know of each collective, so that each is Python's

    ranks = Word(3, int)  # counted up with each loss of some

    def __init__(self) -> None:
        self.words = np.zeros(4, np.int64)
        self.lock = threading.RLock()  # what is held
        self._native: Any = None
        self._beginning = threading.Lock()
        self._depth = 0  # collectives may call others

    def __enter__(self) -> None:
        """Local: wait for other threads."""
        if not self.lock.acquire(blocking=False):
            self.contended = True
            self.lock.acquire()
        while self._depth == 0 and not self._take():
            self.lock.release()  # machine code that has the turn may need it for Python
            time.sleep(TURN_SECONDS)
            self.lock.acquire()
        self._depth += 1

    def share_with(self, native: Any) -> None:
        """Local: from now on machine code takes the turn as well, by `take(words)` and `give(words)`."""
        with self._beginning:
            self._native = native

    def _take(self) -> bool:
        """Local: for this thread, which has the lock: no machine code has it, nor one that is there from now on."""
        with self._beginning:
            if self._native is not None:
                return bool(self._native.take(self.words))
            self._taken = 1
            return True

    @contextlib.contextmanager
    def handed_over(self) -> Iterator[None]:
        """Local: machine code of this thread has taken the turn, and calls Python meanwhile."""
        with self.lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def __exit__(self, kind: object, *exception: object) -> None:
        """Local.

        Raises:
            MismatchError: another thread has come meanwhile.
        """
        self._depth -= 1
        outermost = self._depth == 0
        if outermost and self._native is not None:
            self._native.give(self.words)
        elif outermost:
            self._taken = 0
        self.lock.release()
        if self.contended and outermost and kind is None:
            raise MismatchError(f"several threads of this rank {THREADS}")


class Agreement:
    """Gathers headers on one communicator.

    Args:
        ranks: their numbers in the job, for messages, where the group is a part of it.

    Attributes:
        waiting_seconds: until the slowest rank had come, in all.
    """

    waiting_seconds = Word(0, float)

    def __init__(self, communicator: Communicator, hosts: Sequence[str], ranks: Sequence[int] | None = None) -> None:
        self._communicator = communicator
        self.turn = Turn()  # held while a collective is called, by what calls more than its header
        self.words = np.zeros(1, np.float64)
        self._observer: Observer | None = None
        # called on a rank at the end of its program where others go on
        self.missed: Callable[[], object] = lambda: None
        self.own = np.zeros(3 + REPORTS, np.float64)  # this rank's header
        # A hash has 62 bits, of which a float64 would keep 53: it travels as the bits of an int64.
        self._what = self.own[:1].view(np.int64)
        self.renew(hosts, ranks)
        self._known: dict[int, Call] = {**IDLE}

    @property
    def observer(self) -> Observer | None:
        """What is told of each collective, if anything."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer, self.turn.observed = observer, observer is not None

    @property
    def request(self) -> int:
        """Bits that all ranks see in the next header; their meaning is the caller's."""
        return int(self.own[2])

    @request.setter
    def request(self, bits: int) -> None:
        self.own[2] = bits

    @property
    def report(self) -> Sequence[float]:
        """This rank's numbers, see REPORTS."""
        return tuple(self.own[3:].tolist())

    @report.setter
    def report(self, numbers: Sequence[float]) -> None:
        self.own[3:] = numbers

    def renew(self, hosts: Sequence[str], ranks: Sequence[int] | None = None) -> None:
        """Local: from now on these ranks agree, the ones that the communicator has now."""
        size = self._communicator.size
        self._hosts = tuple(hosts)
        self._numbers = range(size) if ranks is None else tuple(ranks)
        self.headers = np.zeros((size, 3 + REPORTS), np.float64)  # of all ranks, in the latest call
        self._calls = self.headers.view(np.int64)[:, 0]
        self._everyone = np.ones(size, np.bool_)
        self.turn.ranks += 1

    def call(self, what: Call | str, *, samples: float = 1.0, idle_ok: bool = False, gathered: bool = False) -> Agreed:
        """Collective: agree that all ranks call this now.

        Args:
            what: operation and arguments that must be equal on all ranks; a text stands for a `Meeting`.
            samples: weight of this rank's contribution.
            idle_ok: ranks out of data may take part with nothing (gradient updates).
            gathered: `headers` are those of this call already.

        Raises:
            MismatchError: on every rank, when ranks call different things.
            RankFinishedError: on every active rank, when a rank is at the end of its program.
        """
        called = meeting(what) if isinstance(what, str) else what
        signature = called.signature
        self._known[signature] = called
        with self.turn:
            if not gathered:
                self._gather(signature, samples)
            agreed = self._judge(signature)
            # The very array that `everyone` gives where all call the same; one that only equals it is never made.
            if agreed.active is self._everyone:
                return agreed
            agreed = self._ask_idle(agreed, called, lambda call: samples)
        if not (agreed.possible and idle_ok):
            self._raise_idle(called)
        return agreed

    def idle(self, finished: bool = False, able: Able | None = None) -> Agreed:
        """Collective: this rank has no more data; learn what the others do.

        Args:
            finished: this rank is at the end of its program.
            able: tells of a call how many samples this rank still has to contribute, 0 for none, or None if it
                cannot take part. Then `possible` is False, and the active ranks raise.
        """
        with self.turn.lock:
            state = FINISHED if finished else JOINING
            self._gather(state, 0.0)
            agreed = self._judge(state)
            if not agreed.active.any():
                return agreed
            if finished:
                self.missed()
            return self._ask_idle(agreed, None, able or (lambda call: 0.0))

    def leave(self) -> None:
        """Collective: wait until all ranks are at the end of their programs, able to take part in nothing."""
        while self._communicator.size > 1 and not self.idle(finished=True, able=lambda call: None).finished:
            pass

    def number(self, rank: int) -> int:
        """Local: the number in the job of a rank of this group."""
        return self._numbers[rank]

    def _ask_idle(self, agreed: Agreed, own: Call | None, able: Able) -> Agreed:
        """Collective: what ranks without data answer, once they know what the others do."""
        call: Call = self._communicator.broadcast_obj(own, int(np.argmax(agreed.active)))
        samples = able(call)
        answers = np.zeros(self._communicator.size, np.float64)
        self._communicator.all_gather(np.array([-1.0 if samples is None else samples]), answers)
        return replace(agreed, samples=answers.clip(0.0), possible=bool((answers >= 0).all()), call=call)

    def _gather(self, what: int, samples: float) -> None:
        """Collective: `headers` become those of all ranks."""
        self._what[0] = CONTENDED if self.turn.contended and what > FINISHED else what
        self.own[1] = samples
        activity = self._communicator.activity
        inside = activity.inside
        if inside is None:
            activity.inside = self._known[what]
        start = time.perf_counter()
        try:
            self._communicator.all_gather(self.own, self.headers)
        finally:
            activity.inside = inside
        end = time.perf_counter()
        self.waiting_seconds += end - start
        if self.observer is not None and what > FINISHED:
            self.observer.agreed(self._known[what], start, end)

    def everyone(self, headers: Buffer) -> Agreed:
        """Local: what headers say in which all ranks call the same."""
        return Agreed(headers[:, 1], headers[:, 3:], headers[:, 2], self._everyone)

    def _judge(self, what: int) -> Agreed:
        """Local: what the headers say to a rank that calls `what`; collective where they do not agree.

        Raises:
            MismatchError: ranks call different things.
        """
        calls = self._calls.tolist()  # lists: numpy takes longer for a few numbers than all the rest of this
        # The next header arrives in the same memory, while these numbers are still read.
        all_told = self.headers.copy()
        samples_of_all, requests, reports = all_told[:, 1], all_told[:, 2], all_told[:, 3:]
        if what > FINISHED and calls.count(what) == len(calls):
            return self.everyone(all_told)
        if CONTENDED in calls:
            if what > FINISHED:
                self._raise_contended([call == CONTENDED for call in calls])
            return Agreed(samples_of_all, reports, requests, ~self._everyone)
        if len({call for call in calls if call > FINISHED}) > 1:
            # Ranks without data come here as well: the others' calls are told by a collective of all.
            self._raise_mismatch(what)
        return Agreed(
            samples_of_all,
            reports,
            requests,
            np.array([call > FINISHED for call in calls]),
            calls.count(FINISHED) == len(calls),
        )

    def _raise_contended(self, contended: Sequence[bool]) -> NoReturn:
        ranks = [rank for rank, is_so in enumerate(contended) if is_so]
        raise MismatchError(f"several threads of {self.name(ranks)} {THREADS}")

    def _raise_mismatch(self, what: int) -> NoReturn:
        told = self._communicator.all_gather_obj((str(self._known[what]), self.turn.contended))
        texts, contended = zip(*told, strict=True)
        if any(contended):  # by a thread that came after the header was sent
            self._raise_contended(contended)
        groups: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            groups.setdefault(text, []).append(rank)
        lines = [f"  {self.name(ranks)}: {shorten(text, list(groups))}" for text, ranks in groups.items()]
        raise MismatchError(
            "ranks call different collectives at the same point:\n"
            + "\n".join(lines)
            + "\nAll ranks must call the same operation, with equal shapes and dtypes, in the same order."
        )

    def _raise_idle(self, called: Call) -> NoReturn:
        codes = self._calls.tolist()
        idle = [rank for rank, code in enumerate(codes) if code <= FINISHED]
        others = [rank for rank, code in enumerate(codes) if code > FINISHED]
        state = self._known[codes[idle[0]]]
        raise RankFinishedError(
            f"{self.name(others)} called {called}, but {self.name(idle)} will not come: {state}. "
            "Every rank must call each collective, and make at least one update of each kind itself."
        )

    def name(self, ranks: Sequence[int]) -> str:
        """Local: ranks and their hosts, for messages."""
        hosts = sorted({self._hosts[rank] for rank in ranks})
        word = "rank" if len(ranks) == 1 else "ranks"
        return f"{word} {', '.join(str(self._numbers[rank]) for rank in ranks)} ({', '.join(hosts)})"


def shorten(text: str, others: Sequence[str], width: int = 200) -> str:
    """Local: `text` from the first line on that is not the same in all `others`."""
    if len(text) <= width:
        return text
    mine = text.split("\n")
    rest = [other.split("\n") for other in others if other != text]
    for index, line in enumerate(mine):
        if any(index >= len(other) or other[index] != line for other in rest):
            return f"{mine[0]} ... item {index}: {line}"
    return f"{mine[0]} ... {len(mine)} items, then nothing"
