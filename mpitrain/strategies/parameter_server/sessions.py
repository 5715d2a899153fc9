"""What one server hosts for one optimizer of the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.comm.communicator import Buffer
from mpitrain.strategies.parameter_server.averages import clip_factors, mean, mean_rows, squares
from mpitrain.strategies.parameter_server.layout import layout, specs_of
from mpitrain.strategies.parameter_server.messages import Message
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.policies import AsyncPolicy, Push, SyncPolicy

Answering = Callable[..., None]


class Session:
    """The parts of one optimizer that are hosted here.

    Args:
        setup: what the first worker told.
        server: position of this server.
        servers: how many there are.
        workers: how many there are.
        options: how they are updated.
        traced: see `ServerPart`.
        answer: sends a part to a worker: called with (session, worker, part, dropped).
        add_up: sums an array over some servers.
    """

    def __init__(
        self,
        number: int,
        setup: Mapping[str, Any],
        server: int,
        servers: int,
        workers: int,
        options: ServerOptions,
        traced: bool,
        answer: Answering,
        add_up: Callable[[Buffer, Sequence[int]], Buffer],
    ) -> None:
        from mpitrain.strategies.parameter_server.server_parts import ServerPart  # loads Keras

        self.number, self.setup = number, setup
        self.layout, self.specs = layout(setup, servers, options), specs_of(setup)
        # positions of the parts that are hosted here, in the order in which they come
        self.own = self.layout.of_server(server)
        self.parts = {part: ServerPart(self.layout.parts[part], self.specs, setup, traced) for part in self.own}
        self.answered: dict[int, int] = {}  # version that each worker has got in full
        # version of the rows of a sparse part that a worker has got, by (worker, part)
        self.seen: dict[tuple[int, int], int] = {}
        # rows of a gradient that is not answered yet, by (worker, part), where these alone come back
        self.pushed: dict[tuple[int, int], Buffer] = {}
        self._answer, self._add_up = answer, add_up
        # A norm is known when all parts have come.
        whole = bool(setup["clipnorm"] or setup["global_clipnorm"]) or options.whole_updates
        self._servers = [one for one in range(servers) if self.layout.of_server(one)]
        self.policy: SyncPolicy | AsyncPolicy
        if options.mode == "sync":
            self.policy = SyncPolicy(self, self.own, workers, options.backup_workers, whole)
        else:
            self.policy = AsyncPolicy(self, self.own, workers, options)

    @property
    def iterations(self) -> int:
        """Of the optimizers here."""
        return self.parts[self.own[-1]].iterations if self.own else 0

    def slot_names(self) -> list[list[list[str]]]:
        """Local: of each part here, of each shard, the names of the optimizer's slots."""
        return [[shard.slot_names for shard in self.parts[part].shards] for part in self.own]

    def empty_states(self, part: int, with_slots: bool) -> list[list[Buffer]]:
        """Local: room for what `HostedPart.set_state` takes."""
        return [
            [np.empty(array.shape, array.dtype) for array in shard.state()[: None if with_slots else 1]]
            for shard in self.parts[part].shards
        ]

    def came(self, worker: int, message: Message, content: Any) -> None:
        """Local: one part of a gradient of a worker."""
        self.policy.came(worker, message, content)

    def on_shrink(self, left: Sequence[int]) -> None:
        """Local: some workers were lost. Those that are left have got nothing yet; see `policies.Counts.on_shrink`."""
        self.answered, self.seen, self.pushed = {}, {}, {}
        self.policy.on_shrink(left)

    # What the policy asks for.

    def update(self, part: int, pushes: Sequence[Push], learning_rate: float, divisor: float) -> None:
        """Local: see `policies.Host`."""
        self._apply(part, self._mean(part, pushes), learning_rate, divisor, np.ones(len(self.specs)))

    def update_all(self, pushes: Sequence[Push], learning_rate: float) -> None:
        """Local, and together with the other servers where gradients are clipped: see `policies.Host`."""
        means = {part: self._mean(part, pushes) for part in self.own}
        factors = np.ones(len(self.specs))
        clipnorm, global_clipnorm = self.setup["clipnorm"], self.setup["global_clipnorm"]
        if clipnorm or global_clipnorm:
            sums = np.zeros(len(self.specs))
            for part, content in means.items():
                sums += squares(self.layout.parts[part], content, len(self.specs))
            # A norm is that of all parts, on whatever servers, which come here in the same step.
            factors = clip_factors(self._add_up(sums, self._servers), clipnorm, global_clipnorm)
        for part, content in means.items():
            self._apply(part, content, learning_rate, 1.0, factors)

    def answer(self, worker: int, part: int, dropped: bool) -> None:
        """Local: see `policies.Host`."""
        self._answer(self, worker, part, dropped)

    def _mean(self, part: int, pushes: Sequence[Push]) -> Any:
        samples = [push.first.samples for push in pushes]
        contents = [push.content[part] for push in pushes]
        average = mean_rows if self.layout.parts[part].sparse else mean
        return average(contents, samples, self.layout.parts[part].dtype)

    def _apply(self, part: int, content: Any, learning_rate: float, divisor: float, factors: Buffer) -> None:
        hosted = self.parts[part]
        own = [float(factors[piece.shard.variable]) for piece in hosted.part.pieces]
        if hosted.part.sparse:
            values, indices = content
            hosted.update_rows(values, indices, learning_rate, divisor, own[0])
        else:
            hosted.update(content, learning_rate, divisor, own)
