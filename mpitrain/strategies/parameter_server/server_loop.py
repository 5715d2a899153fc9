"""The loop of a rank that hosts parameters: it listens to all workers at once, and never waits for one of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator, Request
from mpitrain.reduction.pool import BufferPool
from mpitrain.strategies.parameter_server.messages import (
    COLUMNS,
    Answer,
    Kind,
    Message,
    Status,
    as_text,
    from_text,
    travel_dtype,
)
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import Roles
from mpitrain.strategies.parameter_server.sessions import Session

SPIN_SECONDS = 3e-4
LONGEST_NAP_SECONDS = 2e-4


class ServerLoop:
    """One server.

    Args:
        there: all ranks of the job, on the way from the workers.
        back: the same on the way to them; `there` itself unless a rank is both server and worker.
        options: how parameters are hosted and updated.

    Attributes:
        signal: number of a signal that came to this rank, which the workers are told of.
    """

    def __init__(self, there: Communicator, back: Communicator, roles: Roles, options: ServerOptions) -> None:
        self._there, self._back, self._roles, self._options = there, back, roles, options
        self._index = roles.servers.index(there.rank)
        self._sessions: dict[int, Session] = {}
        self._generations: dict[int, int] = {}
        self._begins: list[tuple[int, Message, str]] = []
        self._idle: set[int] = set()
        self._stopped: set[int] = set()
        self._sends: list[tuple[Request, Buffer]] = []
        self._pool = BufferPool()
        self._talks: dict[int, Iterator[Request]] = {}
        self._left_behind: list[object] = []
        self._numbers, self._done = roles.workers, Counter[int]()
        self._signal = self.signal = 0
        self.position = 0

    def serve(self) -> None:
        """Local: answer the workers until all of them have come to the end of their programs."""
        present = [worker for worker in range(len(self._roles.workers)) if worker not in self._stopped]
        talks = self._talks = {worker: self._conversation(worker) for worker in present}
        waiting = {worker: next(talk) for worker, talk in talks.items()}
        idle_since = time.perf_counter()
        while waiting or self._sends:
            # Once a round, for it is set by a signal's handler: all answers of a round say the same.
            self._signal = self.signal
            came = [worker for worker, request in waiting.items() if request.test()]
            if self._roles.serving_only:
                # Of workers without data the watchdog cannot tell whether they wait in vain.
                activity = self._there.activity
                activity.inside = "until all workers are at the end of their data" if self._idle else None
                activity.moved += len(came)
            for worker in came:
                request = next(talks[worker], None)
                if request is None:
                    del waiting[worker]
                else:
                    waiting[worker] = request
            self._sends = [entry for entry in self._sends if not entry[0].test()]
            if came:
                idle_since = time.perf_counter()
            else:
                _nap(time.perf_counter() - idle_since)

    def on_shrink(self, roles: Roles, left: Sequence[int], ended: Sequence[int]) -> None:
        """Local: some workers were lost; to be followed by `serve`. What was half received or sent is forgotten.

        Args:
            roles: of the ranks that are left.
            left: of each worker that is left, counted anew, which it was.
            ended: those of them, counted anew, that are at the end of their programs.
        """
        self._left_behind.append((self._talks, self._sends, self._pool))  # something may still arrive in it
        self._pool, self._sends, self._begins = BufferPool(), [], []
        self._roles, self._idle, self._stopped = roles, set(), set(ended)
        self._index = roles.servers.index(self._there.rank)
        self._generations = dict.fromkeys(self._sessions, 0)
        for session in self._sessions.values():
            self._keep_done(session)
            session.on_shrink(left)
            session.policy.active -= self._stopped
        self._numbers = tuple(self._numbers[worker] for worker in left)

    def _keep_done(self, session: Session) -> None:
        """Local: a session forgets how many gradients of each worker it has seen."""
        for worker, number in session.policy.done.items():
            self._done[self._numbers[worker]] += number

    # What a worker says.

    def _conversation(self, worker: int) -> Iterator[Request]:
        """Local: all that one worker says, as the transfers that have to come next."""
        words = np.zeros(Message.WORDS)
        while True:
            yield self._there.irecv(words, self._roles.workers[worker])
            message = Message.unpack(words)
            self.position = max(self.position, message.position)
            if message.kind is Kind.STOP:
                self._stopped.add(worker)
                self._absent(worker)
                return
            if message.kind is Kind.IDLE:
                self._idle.add(worker)
                self._absent(worker)
            elif message.kind is Kind.BEGIN:
                yield from self._begin(worker, message)
            elif message.kind is Kind.PUSH:
                yield from self._pushed(worker, message)
            elif message.kind is Kind.ROWS:
                indices = np.empty(message.count, np.int64)
                yield from self._receive(worker, indices)
                self._send_rows(worker, message, indices)
            elif message.kind is Kind.STATE:
                self._send_state(worker, message.session)
            else:
                self._send_text(worker, message.session, Status.OK, self._counted(message.session))

    def _receive(self, worker: int, *buffers: Buffer) -> Iterator[Request]:
        """Local: into these buffers, of which empty ones do not travel."""
        rank = self._roles.workers[worker]
        yield from [self._there.irecv(buffer.reshape(-1), rank) for buffer in buffers if buffer.nbytes]

    def _pushed(self, worker: int, message: Message) -> Iterator[Request]:
        session = self._sessions[message.session]
        part = session.layout.parts[message.part]
        dtype = travel_dtype(part.dtype, self._options.compression)
        if part.sparse:
            row = session.specs[part.pieces[0].shard.variable].shape[1:]
            values, indices = np.empty((message.count, *row), dtype), np.empty(message.count, np.int64)
            yield from self._receive(worker, indices, values)
            if self._options.rows == "pushed":
                session.pushed[worker, message.part] = indices
            session.came(worker, message, (values, indices))
        else:
            array = self._pool.take(part.size, dtype.name)
            yield from self._receive(worker, array)
            session.came(worker, message, array)
        self._look_at_begins()

    def _begin(self, worker: int, message: Message) -> Iterator[Request]:
        content = np.empty(message.count, np.uint8)
        yield from self._receive(worker, content)
        number = message.session
        # The first worker alone brings values: the others get them once they are here.
        if worker > 0:
            self._begins.append((worker, message, from_text(content)["digest"]))
            self._look_at_begins()
            return
        setup = from_text(content)
        try:
            session = self._session(number, setup)
        except Exception as error:  # of the user's optimizer: all kinds; the worker tells it
            self._send_text(worker, number, Status.REFUSED, f"{type(error).__name__}: {error}")
            return
        self._send_text(worker, number, Status.OK, session.slot_names())
        for part in session.own:
            states = session.empty_states(part, with_slots=setup["has_state"])
            yield from self._receive(worker, *[array for state in states for array in state])
            session.parts[part].set_state(states, setup["iterations"])
        if number in self._sessions:
            self._keep_done(self._sessions[number])
        self._sessions[number], self._generations[number] = session, message.version
        self._look_at_begins()

    def _session(self, number: int, setup: dict[str, Any]) -> Session:
        servers, workers = len(self._roles.servers), len(self._roles.workers)
        traced = bool(self._roles.serving_only)
        calls = (self._answer, self._add_up)
        session = Session(number, setup, self._index, servers, workers, self._options, traced, *calls)
        session.policy.active -= self._idle | self._stopped
        return session

    def _look_at_begins(self) -> None:
        """Local: let workers begin whose session is there, and warmed up."""
        for entry in list(self._begins):
            worker, message, digest = entry
            number = message.session
            if self._generations.get(number, -1) < message.version:
                continue
            session = self._sessions[number]
            cold = session.own and session.policy.version < self._options.warmup_steps and 0 in session.policy.active
            if cold and digest == session.setup["digest"]:
                continue
            self._begins.remove(entry)
            if digest != session.setup["digest"]:
                text = f"its update is another one than that of the first worker ({session.setup['title']})"
                self._send_text(worker, number, Status.REFUSED, text)
                continue
            self._send(worker, self._header(session, Status.OK, 0, 0))
            for part in session.own:
                session.seen[worker, part] = -1  # no row of it, changed or not
                self._answer(session, worker, part, dropped=False)

    def _absent(self, worker: int) -> None:
        """Local: this worker is not waited for; let all go on if none has data left."""
        for session in self._sessions.values():
            session.policy.active.discard(worker)
            session.policy.look()
        self._look_at_begins()
        present = set(range(len(self._roles.workers))) - self._stopped
        if present and self._idle >= present:
            for one in sorted(present):
                self._release(one)
            for session in self._sessions.values():
                session.policy.active |= present
                session.policy.released()
            self._idle.clear()

    # What is answered.

    def _send(self, worker: int, *buffers: Buffer) -> None:
        for buffer in buffers:
            if buffer.nbytes:
                flat = np.ascontiguousarray(buffer).reshape(-1)
                self._sends.append((self._back.isend(flat, self._roles.workers[worker]), flat))

    def _send_text(self, worker: int, session: int, status: Status, content: Any) -> None:
        text = as_text(content)
        table = np.zeros((len(self._roles.workers), COLUMNS))
        self._send(worker, Answer(status, session, 0, 0, 0, len(text), 0.0, self.position, table).pack(), text)

    def _header(self, session: Session, status: Status, part: int, count: int) -> Buffer:
        table = np.zeros((len(self._roles.workers), COLUMNS))
        for push in session.policy.step:
            first = push.first
            # A signal may have come to this rank alone, which makes no updates: it goes with what a worker tells.
            table[push.worker] = (1.0, first.samples, first.request or self._signal << 1, *first.report)
        policy = session.policy
        numbers = (session.number, part, policy.version, session.iterations, count, policy.counts.samples)
        return Answer(status, *numbers, self.position, table).pack()

    def _answer(self, session: Session, worker: int, part: int, dropped: bool) -> None:
        """Local: a part as it is now; of a sparse one the rows that this worker has not seen, or has pushed."""
        hosted = session.parts[part]
        status = Status.DROPPED if dropped else Status.OK
        dtype = travel_dtype(hosted.part.dtype, self._options.compression)
        if part == session.own[-1]:
            session.answered[worker] = session.policy.version
        if not hosted.part.sparse:
            values = hosted.packed().astype(dtype, copy=False)
            self._send(worker, self._header(session, status, part, 0), values)
            return
        key = (worker, part)
        if key in session.pushed:
            indices = session.pushed.pop(key)
        else:
            indices = hosted.rows_since(session.seen.get(key, 0))
            session.seen[key] = hosted.version
        values = hosted.rows(indices).astype(dtype, copy=False)
        self._send(worker, self._header(session, status, part, len(indices)), indices, values)

    def _release(self, worker: int) -> None:
        """Local: all workers have come to the same place: each gets what it has not got, as it is for all."""
        sync = self._options.mode == "sync" and not self._options.backup_workers and self._options.rows == "changed"
        behind = [
            session
            for session in self._sessions.values()
            if session.own and not (sync and session.answered.get(worker, 0) == session.policy.version)
        ]
        table = np.zeros((len(self._roles.workers), COLUMNS))
        self._send(worker, Answer(Status.OK, 0, 0, 0, 0, len(behind), 0.0, self.position, table).pack())
        for session in behind:
            self._send(worker, self._header(session, Status.OK, 0, 0))
            for part in session.own:
                self._answer(session, worker, part, dropped=False)

    def _send_rows(self, worker: int, message: Message, indices: Buffer) -> None:
        session = self._sessions[message.session]
        values = session.parts[message.part].rows(indices)
        self._send(worker, self._header(session, Status.OK, message.part, len(indices)), values)

    def _send_state(self, worker: int, number: int) -> None:
        session = self._sessions[number]
        states = [state for part in session.own for state in session.parts[part].states()]
        shapes = [[[array.dtype.name, list(array.shape)] for array in state] for state in states]
        told = {"iterations": session.iterations, "shapes": shapes, "slots": session.slot_names()}
        self._send_text(worker, number, Status.OK, told)
        self._send(worker, *[array for state in states for array in state])

    def _counted(self, number: int) -> dict[str, Any]:
        done = Counter(self._done)
        for other in self._sessions.values():
            done.update({self._numbers[worker]: number for worker, number in other.policy.done.items()})
        session = self._sessions.get(number)
        if session is None:
            return {"done": dict(done)}
        counts = session.policy.counts
        return {
            "done": dict(done),
            "updates": counts.updates,
            "samples": counts.samples,
            "dropped": dict(counts.dropped),
            "staleness": dict(sorted(counts.staleness.items())),
        }

    def _add_up(self, own: Buffer, servers: Sequence[int]) -> Buffer:
        """Local: the sum over these servers, all of which come here in the same step; the same bits on all."""
        ranks = self._roles.servers
        everyone = np.zeros((len(ranks), *own.shape))
        everyone[self._index] = own
        others = [place for place in servers if place != self._index]
        # Gathered and then added, by each in the order of the servers: so all clip by the same factor, to the bit.
        requests = [self._there.irecv(everyone[place], ranks[place]) for place in others]
        requests += [self._there.isend(own, ranks[place]) for place in others]
        for request in requests:
            request.wait()
        return np.asarray(everyone.sum(axis=0))


def _nap(waited_seconds: float) -> None:
    """Local: give way to the workers of this host; the delay stays within an eighth of the time waited."""
    if waited_seconds < SPIN_SECONDS:
        time.sleep(0)
    else:
        time.sleep(min(LONGEST_NAP_SECONDS, waited_seconds / 8))
