"""The same updates under TensorFlow's own `ParameterServerStrategy`, in the same job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.bench.interleave import on_root
from mpitrain.cluster.server import start_server
from mpitrain.world.world import World

NAME = "ParameterServerStrategy"


class ServerStrategy:
    """Collective: the first ranks become its servers, the others its workers, and rank 0 its coordinator as well.

    The strategy is asynchronous: each step of a worker reads all variables, and sends a gradient for each, which its
    server applies as plain SGD. As many such steps as there are workers move the bytes of one synchronous update. It
    has to be made before TensorFlow is used, and once in a process. `bind` and `insecure` are those of `start_server`.
    """

    def __init__(self, world: World, servers: int, bind: str | None, insecure_network: bool) -> None:
        self._world, self._workers = world, world.size - servers
        jobs = f"ps={servers},worker={self._workers}"
        server = start_server(jobs, bind=bind, insecure_network=insecure_network, world=world)
        self._coordinator: Any = None
        self._updates: dict[tuple[int, ...], Callable[[], None]] = {}
        if world.is_root:
            import tensorflow as tf

            cluster = tf.train.ClusterSpec(server.cluster.as_dict())
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
            self._strategy = tf.distribute.ParameterServerStrategy(resolver)
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)

    def seconds(self, elements: Sequence[int], calls: int) -> list[float]:
        """Collective: seconds of one update, the mean of `calls`; empty on all ranks but the first."""

        def measure() -> list[float]:
            update = self._update(tuple(elements))
            start = time.perf_counter()
            for _ in range(calls):
                update()
            return [(time.perf_counter() - start) / calls]

        return on_root(self._world.communicator, measure)

    def _update(self, elements: tuple[int, ...]) -> Callable[[], None]:
        """Local, on rank 0: as many steps as there are workers; every worker has made some before."""
        if elements in self._updates:
            return self._updates[elements]
        import tensorflow as tf

        with self._strategy.scope():
            variables = [tf.Variable(np.zeros(size, np.float32)) for size in elements]

        @tf.function
        def step() -> None:
            for variable in variables:
                variable.assign_sub(variable * 1e-9 + 1e-3)  # a gradient that needs the value

        def update() -> None:
            for _ in range(self._workers):
                self._coordinator.schedule(step)
            self._coordinator.join()

        self._updates.clear()  # and the variables of another size with them
        self._updates[elements] = update
        for _ in range(3):  # the first ones trace, and send the graph to the workers
            update()
        return update
