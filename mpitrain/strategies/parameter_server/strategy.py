"""Parameter servers make the updates: what their workers exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.comm.communicator import Buffer
from mpitrain.errors import NonFiniteError, UsageError
from mpitrain.reduction.finite import REMEDY
from mpitrain.runtime import streams
from mpitrain.strategies.all_reduce import AllReduce
from mpitrain.strategies.parameter_server import queries
from mpitrain.strategies.parameter_server.client import Client
from mpitrain.strategies.parameter_server.messages import ACTIVE, REQUEST, SAMPLES
from mpitrain.strategies.parameter_server.sending import Sending
from mpitrain.strategies.strategy import Strategy, Update
from mpitrain.world.agreement import Agreed
from mpitrain.world.world import World

LOOKED_AT_BYTES = 1 << 20


class ServedOptimizer(Protocol):
    """An optimizer whose updates are made by servers: `worker_optimizer.WorkerOptimizer`, which needs Keras."""

    def variables(self, session: Sending) -> Sequence[Any]:
        """Local: of which the gradients are."""
        ...

    def assign(self, session: Sending, arrays: Sequence[Buffer]) -> None:
        """Local: the variables get these values."""
        ...


class ParameterServers(Strategy):
    """Workers exchange gradients and parameters with the servers; the gradients of tapes among themselves.

    Args:
        world: the workers.
        client: the servers, as this worker sees them.
        serve: makes a `ServedOptimizer` of an optimizer, its title and this.
    """

    lockstep = takes_accumulated = replicates_state = False

    def __init__(
        self, world: World, client: Client, serve: Callable[[Any, str, ParameterServers], ServedOptimizer]
    ) -> None:
        super().__init__(world)
        self.client, self._serve = client, serve
        self._among = AllReduce(world)
        self._optimizers_served: weakref.WeakValueDictionary[int, ServedOptimizer] = weakref.WeakValueDictionary()
        self._agreed: Agreed | None = None
        self._warned: set[int] = set()

    @property
    def in_step(self) -> bool:
        return self.client.in_step and self.client.options.rows == "changed"

    @property
    def agreed(self) -> Agreed | None:
        return self._agreed

    def attach(self, update: Update) -> None:
        if update.optimizer is None:
            return
        if update.added_up:
            raise UsageError("parameter servers average gradients: divide the loss by the samples of each rank")
        update.state = self._serve(update.optimizer, update.title, self)

    def update(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> Any:
        """Collective in sync mode: the servers apply the gradients, and the variables get the new values."""
        if update.optimizer is None:
            return self._among.update(gradients, variables, update)
        return update.state.update(gradients, variables)

    def begin_anew(self, update: Update) -> None:
        update.state.begin_anew()

    def fetch_state(self, update: Update, alone: bool = False) -> None:
        """Local: of rank 0, or this one."""
        if alone or self.world.is_root:
            update.state.fetch()

    def add(self, session: Sending, optimizer: ServedOptimizer) -> None:
        """Local: whose variables those of a session are."""
        self._optimizers_served[session.number] = optimizer

    def join(self, collectives: bool = False) -> int:
        """Collective: wait until all workers are here; the variables are then the servers', the same on all."""
        for session, arrays in self.client.join(self._values):
            optimizer = self._optimizers_served.get(session.number)
            if optimizer is not None:
                optimizer.assign(session, arrays)
        return 0

    def on_shrink(self) -> None:
        self._among.on_shrink()
        self._agreed = None
        job = self.world.shrink_group.job
        # Numbers of the job, and not of the workers: servers are among those that are left, too.
        self.client.on_shrink(job.numbers, job.hosts)

    def catch_up(self) -> None:
        self.join()

    def done(self) -> Mapping[int, int]:
        return queries.done(self.client.channel)

    def _values(self, session: Sending) -> Sequence[Buffer]:
        optimizer = self._optimizers_served.get(session.number)
        if optimizer is None:  # the program has dropped it
            return [np.zeros(spec.shape, spec.dtype) for spec in session.layout.plan.specs]
        return [np.array(variable.numpy()) for variable in optimizer.variables(session)]

    def note(self, session: Sending) -> None:
        """Local: an update is done."""
        statistics, activity, answer = self.statistics, self.world.activity, session.last
        assert answer is not None
        statistics.updates += 1
        activity.updates = statistics.updates
        if activity.phase == "start":
            activity.phase = "compute"
        statistics.exchange = self.client.pushing_seconds
        waited = self.client.waiting_seconds - statistics.waiting
        statistics.waiting += waited
        self.world.agreement.waiting_seconds += waited
        # Each server counts for itself, and one may be an update ahead.
        statistics.samples_global = max(statistics.samples_global, answer.samples)
        if self.in_step:
            table = answer.workers
            columns = (table[:, SAMPLES], table[:, REQUEST + 1 :], table[:, REQUEST])
            self._agreed = Agreed(*columns, table[:, ACTIVE] > 0)

    def look(self, session: Sending, bucket: int, arrays: Sequence[Buffer]) -> None:
        """Local: this worker's gradients are finite.

        Raises:
            NonFiniteError: they are not, and that is to end the job.
        """
        action = self.finite.action
        if action == "ignore":
            return
        members = session.layout.plan.buckets[bucket].members
        for member, array in zip(members, arrays, strict=False):
            flat = array.reshape(-1)[: LOOKED_AT_BYTES // array.itemsize]
            total = np.add.reduce(flat) if flat.size else 0.0
            if total - total == 0 or np.isfinite(flat).all():
                continue
            number = self.world.agreement.name([self.world.rank])
            text = (
                f"the gradient of {session.layout.plan.specs[member].name} is not finite on {number} in update "
                f"{self.statistics.updates + 1}. {REMEDY}"
            )
            if action == "stop":
                self.world.activity.error = error = NonFiniteError(text)
                raise error
            if session.number not in self._warned:
                self._warned.add(session.number)
                streams.write_stderr(f"mpitrain: warning: {text}\n")


def servers_of(world: World) -> ParameterServers | None:
    """Local: what serves these workers, if parameter servers do."""
    return world.strategy if isinstance(world.strategy, ParameterServers) else None
