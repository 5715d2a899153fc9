"""A worker's end: gradients go to the servers part by part, and the new parameters come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer, Communicator, Request
from mpitrain.reduction.pool import BufferPool
from mpitrain.reduction.sparse import merge_rows
from mpitrain.strategies.parameter_server.arrays import State, rounded
from mpitrain.strategies.parameter_server.channel import Channel
from mpitrain.strategies.parameter_server.layout import layout, specs_of
from mpitrain.strategies.parameter_server.messages import (
    NEVER_LATE,
    Answer,
    Kind,
    Message,
    Status,
    as_text,
    travel_dtype,
)
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.roles import Roles
from mpitrain.strategies.parameter_server.sending import Coming, Sending
from mpitrain.strategies.parameter_server.shards import Part
from mpitrain.world.agreement import Agreement


class Client:
    """The servers, as one worker sees them.

    Args:
        there: all ranks of the job, on the way to the servers.
        back: the same on the way from them; `there` itself unless a rank is both server and worker.
        options: how parameters are hosted and updated.
        agreement: of the workers: has what this worker tells the others.
    """

    def __init__(
        self,
        there: Communicator,
        back: Communicator,
        roles: Roles,
        options: ServerOptions,
        agreement: Agreement,
        hosts: Sequence[str],
    ) -> None:
        self.channel = Channel(there, back, roles, hosts)  # to them
        self.options, self._agreement, self._all_roles = options, agreement, roles
        self.activity, self.hosts = there.activity, len(set(hosts))
        self._pool, self._generations, self._stopped = BufferPool(), 0, False
        self._left_behind: list[object] = []
        self.sessions: dict[int, Sending] = {}  # the optimizers of this worker, by number
        self.pushing_seconds = self.waiting_seconds = 0.0

    @property
    def roles(self) -> Roles:
        """Who is what now."""
        return self.channel.roles

    @property
    def in_step(self) -> bool:
        """All workers make each update together."""
        return self.options.mode == "sync" and not self.options.backup_workers

    def session(self, setup: dict[str, Any]) -> Sending:
        """Local: a new optimizer; all workers make theirs in the same order."""
        found = Sending(len(self.sessions), setup, layout(setup, len(self.channel.roles.servers), self.options))
        self.sessions[found.number] = found
        return found

    # The beginning.

    def begin(self, session: Sending, values: Callable[[], State], iterations: int) -> State | None:
        """Collective over the workers: the first one's parameters go to the servers.

        Args:
            session: all workers give the same.
            values: of each variable its value, and where the optimizer has made updates its slots, by `slot_names`.
            iterations: updates that the optimizer has made.

        Returns:
            The servers' values, on workers other than the first.

        Raises:
            UsageError: the servers cannot host this.
            CollectiveError: it is not what the first worker has.
        """
        self._generations += 1
        # The first worker speaks for all; by the digest the servers see that the others would say the same.
        setup = dict(session.setup) if self.channel.worker == 0 else {"digest": session.setup["digest"]}
        text = as_text({**setup, "iterations": iterations, "has_state": iterations > 0})
        head = Message(Kind.BEGIN, session.number, version=self._generations, count=len(text))
        for server in range(len(self.channel.roles.servers)):
            self.channel.say(server, head, text)
        result: State | None = None
        if self.channel.worker == 0:
            for server in range(len(self.channel.roles.servers)):
                session.note_slots(server, self.channel.hear_text(server))
            self._send_state(session, values(), iterations > 0)
        else:
            result = [[np.empty(spec.shape, spec.dtype)] for spec in specs_of(session.setup)]
            for server in range(len(self.channel.roles.servers)):
                answer = self.channel.hear(server)
                if answer.status is Status.REFUSED:
                    self.channel.refuse(server, answer)
                self._take_all(session, server, [one[0] for one in result])
            session.discard = self.options.warmup_steps > 0
        session.begun = True
        return result

    def _send_state(self, session: Sending, state: State, with_slots: bool) -> None:
        for part in session.layout.parts:
            for piece in part.pieces:
                shard = piece.shard
                arrays = state[shard.variable][: None if with_slots else 1]
                rows = len(arrays[0]) if arrays[0].ndim else 1
                whole = shard.end - shard.begin == rows
                own = [a if whole or a.ndim == 0 else a[shard.begin : shard.end] for a in arrays]
                self.channel.send(part.server, *own)

    # Updates.

    def push(
        self, session: Sending, bucket: int, arrays: Sequence[Buffer], samples: float, learning_rate: float
    ) -> None:
        """Local: send one bucket of gradients; returns when it has left, so that its memory is free.

        Args:
            session: of the optimizer.
            bucket: position in the plan; buckets go in order.
            arrays: a gradient for each member; (values, indices) of a sparse bucket. Only read.
            samples: behind them.
            learning_rate: of the optimizer here; NaN for that of its schedule.
        """
        start = time.perf_counter()
        activity = self.activity
        # Only where workers wait for each other: elsewhere one that has made fewer steps is not late.
        if bucket == 0 and (self.in_step or self.options.max_staleness is not None):
            activity.position += 1
        activity.inside = session.layout.plan, bucket
        try:
            sends: list[Request] = []
            target = session.layout.plan.buckets[bucket]
            if not target.sparse:
                session.targets[bucket] = self._pool.take(target.size, target.dtype)
            for number in session.layout.of_bucket(bucket):
                part = session.layout.parts[number]
                content = self._content(session, part, arrays)
                head = Message(
                    Kind.PUSH,
                    session.number,
                    number,
                    session.versions.get(part.server, 0),
                    0.0 if session.discard else samples,
                    learning_rate,
                    len(content[0]) if part.sparse else 0,
                    activity.position,
                    self._agreement.request,
                    tuple(self._agreement.report),
                )
                # Expected before the gradient leaves: the answer goes straight to its place, without a copy.
                if not self._comes_after_rows(session, number):
                    session.coming[number] = self._expect(session, number)
                sends += self.channel.start(part.server, head.pack(), *content)
            for request in sends:
                request.wait()
                activity.moved += 1
        finally:
            activity.inside = None
        self.pushing_seconds += time.perf_counter() - start

    def _content(self, session: Sending, part: Part, arrays: Sequence[Buffer]) -> list[Buffer]:
        """Local: what of a bucket goes to a server: (indices, values) of a sparse one."""
        dtype = travel_dtype(part.dtype, self.options.compression)
        if part.sparse:
            values, indices = arrays
            values, indices = merge_rows(values.astype(part.dtype, copy=False), indices.astype(np.int64))
            shard = part.pieces[0].shard
            begin, end = np.searchsorted(indices, (shard.begin, shard.end))
            return [indices[begin:end] - shard.begin, rounded(values[begin:end], dtype)]
        members = session.layout.plan.buckets[part.bucket].members
        found = []
        for piece in part.pieces:
            array = arrays[members.index(piece.shard.variable)].reshape(-1)
            begin = piece.shard.begin * piece.shard.row_size
            found.append(array[begin : begin + piece.shard.size])
        if len(found) == 1:
            return [rounded(np.ascontiguousarray(found[0]), dtype)]
        packed = self._pool.take(part.size, dtype.name)
        for piece, array in zip(part.pieces, found, strict=True):
            packed[piece.offset : piece.offset + piece.shard.size] = rounded(array, dtype)
        return [packed]

    def _comes_after_rows(self, session: Sending, number: int) -> bool:
        """Local: whether something comes before it whose size is not known yet."""
        server = session.layout.parts[number].server
        before = [session.layout.parts[other] for other in session.layout.of_server(server) if other < number]
        return any(part.sparse for part in before)

    def _expect(self, session: Sending, number: int) -> Coming:
        """Local: a part will come: dense values directly into their place, where they are in one piece."""
        part = session.layout.parts[number]
        header = self.channel.new_header()
        coming = Coming(header, self.channel.expect(part.server, header))
        if not part.sparse:
            coming.values = self._place(session, part)
            coming.values_request = self.channel.expect(part.server, coming.values)
        return coming

    def _place(self, session: Sending, part: Part) -> Buffer:
        dtype = travel_dtype(part.dtype, self.options.compression)
        if len(part.pieces) == 1 and dtype == part.dtype and part.bucket in session.targets:
            place = part.pieces[0].place
            return session.targets[part.bucket][place : place + part.size]
        return self._pool.take(part.size, dtype.name)

    def pull(self, session: Sending, bucket: int) -> list[Buffer]:
        """Local: the new values of one bucket that was pushed, once they are there.

        Returns:
            A value for each member; (values, indices) of the rows of a sparse one that were changed.

        Raises:
            CollectiveError: a server refused the gradient.
        """
        start = time.perf_counter()
        activity = self.activity
        activity.inside = session.layout.plan, bucket
        try:
            target = session.layout.plan.buckets[bucket]
            rows: list[tuple[Buffer, Buffer]] = []
            for number in session.layout.of_bucket(bucket):
                # Behind rows nothing could be expected before: see `_comes_after_rows`.
                coming = session.coming.pop(number, None) or self._expect(session, number)
                rows += self._take(session, number, coming)
            if bucket == len(session.layout.plan.buckets) - 1:
                session.discard = False
                session.dropped += session.last is not None and session.last.status is Status.DROPPED
        finally:
            activity.inside = None
        self.waiting_seconds += time.perf_counter() - start
        if target.sparse:
            values, indices = zip(*rows, strict=True)
            return [np.concatenate(values), np.concatenate(indices)]
        flat = session.targets.pop(bucket)
        specs = [session.layout.plan.specs[member] for member in target.members]
        return [
            flat[offset : offset + spec.size].reshape(spec.shape)
            for spec, offset in zip(specs, target.offsets, strict=True)
        ]

    def _take(self, session: Sending, number: int, coming: Coming) -> list[tuple[Buffer, Buffer]]:
        """Local: wait for a part; a dense one is then in its place, rows of a sparse one are returned."""
        part, activity = session.layout.parts[number], self.activity
        coming.request.wait()
        activity.moved += 1
        session.last = answer = Answer.unpack(coming.header)
        session.versions[part.server] = answer.version
        if part.sparse:
            return [self._hear_rows(session, part, answer.count)]
        assert coming.values is not None
        assert coming.values_request is not None
        coming.values_request.wait()
        activity.moved += 1
        flat = session.targets[part.bucket]
        for piece in part.pieces:
            values = coming.values[piece.offset : piece.offset + piece.shard.size]
            if not np.shares_memory(values, flat):
                flat[piece.place : piece.place + piece.shard.size] = values
        return []

    def _hear_rows(self, session: Sending, part: Part, count: int) -> tuple[Buffer, Buffer]:
        shard = part.pieces[0].shard
        row = session.layout.plan.specs[shard.variable].shape[1:]
        indices = np.empty(count, np.int64)
        values = np.empty((count, *row), travel_dtype(part.dtype, self.options.compression))
        self.channel.receive(part.server, indices, values)
        return values.astype(part.dtype, copy=False), indices + shard.begin

    def _take_all(self, session: Sending, server: int, values: Sequence[Buffer]) -> None:
        """Local: all parts of one server, into whole variables; of sparse ones the rows that are new."""
        for number in session.layout.of_server(server):
            part = session.layout.parts[number]
            target = session.layout.plan.buckets[part.bucket]
            if not part.sparse and part.bucket not in session.targets:
                session.targets[part.bucket] = self._pool.take(target.size, target.dtype)
            rows = self._take(session, number, self._expect(session, number))
            for piece in part.pieces:
                shard = piece.shard
                whole = values[shard.variable]
                if rows:
                    whole[rows[0][1]] = rows[0][0]
                else:
                    begin = shard.begin * shard.row_size
                    flat = session.targets[part.bucket][piece.place : piece.place + shard.size]
                    whole.reshape(-1)[begin : begin + shard.size] = flat
        session.targets.clear()

    # Between updates.

    def join(self, values: Callable[[Sending], Sequence[Buffer]]) -> list[tuple[Sending, Sequence[Buffer]]]:
        """Collective over the workers: wait until all have come here; the servers' parameters, the same on all.

        Args:
            values: arrays of the variables of a session, with this worker's values, which are written to.

        Returns:
            The sessions whose parameters were not up to date here, with their values.
        """
        activity = self.activity
        position, activity.position = activity.position + 1, NEVER_LATE  # the servers notice when nothing goes on
        begun = time.perf_counter()
        found = []
        try:
            for server in range(len(self.channel.roles.servers)):
                # All are told before the first is waited for: each answers once all workers have told it.
                self.channel.say(server, Message(Kind.IDLE, position=position, request=self._agreement.request))
            changed: dict[int, Sequence[Buffer]] = {}
            for server in range(len(self.channel.roles.servers)):
                release = self.channel.hear(server)
                position = max(position, release.position)
                for _ in range(release.count):
                    session = self.sessions[self.channel.hear(server).session]
                    if session.number not in changed:
                        changed[session.number] = values(session)
                    self._take_all(session, server, changed[session.number])
            found = [(self.sessions[number], arrays) for number, arrays in changed.items()]
        finally:
            activity.position = position
        self.waiting_seconds += time.perf_counter() - begun
        return found

    def on_shrink(self, numbers: Sequence[int], hosts: Sequence[str]) -> None:
        """Local: ranks were lost, perhaps in the middle of an update.

        Args:
            numbers: in the job as it was started, of those that are left.
            hosts: of each.
        """
        self._left_behind.append((self._pool, [session.on_shrink() for session in self.sessions.values()]))
        self._pool, self._generations = BufferPool(), 0
        self.channel.renew(self._all_roles.among(numbers), hosts)

    def stop(self) -> None:
        """Local: this worker has come to the end of its program; the servers do not wait for it any more."""
        if not self._stopped:
            self._stopped = True
            for server in range(len(self.channel.roles.servers)):
                self.channel.say(server, Message(Kind.STOP, position=self.activity.position))
