"""Parameter servers for programs of one's own."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from mpitrain.config import own_options
from mpitrain.strategies.parameter_server.connection import connect
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.worker_optimizer import served_of
from mpitrain.world.start import init
from mpitrain.world.world import World


class ParameterServer:
    """Parameter servers for a program of one's own: some ranks host the parameters, the others run the program.

    Collective: all ranks make it and call `start`, before TensorFlow is used. From then on optimizers that are made
    distributed (`DistributedOptimizer`, or `callbacks.DataParallel` in `fit`) leave their updates to the servers.

    Args:
        servers: how many of the first ranks, or `colocated`: rank 0 serves, and works too.
        mode: `sync` or `async`.
        sharding: `bytes` or `round-robin`.
        max_shard_bytes: larger variables are split between servers.
        backup_workers: in sync mode, so many gradients of each step are not waited for.
        max_staleness: in async mode, by how many steps a worker may be ahead of the slowest.
        stale: in async mode, gradients of older parameters: `keep`, `drop` or `scale`.
        warmup_steps: in async mode, steps that the first worker trains alone.
        compression: `none` or `float16`.
        rows: of a variable whose gradients are rows, what comes back after an update: all that were `changed` since
            the last time, or those that this worker has `pushed`; it then asks for others (`pull_rows`).
        world: the job; the current one by default.

    Example:
        >>> servers = mpitrain.ParameterServer(servers=1, mode="async", max_staleness=4)
        >>> world = servers.start()  # doctest: +SKIP
    """

    def __init__(
        self,
        servers: int | str = 1,
        mode: str = "sync",
        *,
        sharding: str = "bytes",
        max_shard_bytes: int = 16 << 20,
        backup_workers: int = 0,
        max_staleness: int | None = None,
        stale: str = "keep",
        warmup_steps: int = 0,
        compression: str = "none",
        rows: str = "changed",
        world: World | None = None,
    ) -> None:
        arguments = locals()
        chosen = {name: arguments[name] for name in own_options(ServerOptions)}
        self.options = ServerOptions(**{**chosen, "servers": str(servers)})
        self._world = world

    def start(self) -> World:
        """Collective: the job of the workers, which is the current one from now on.

        On servers this does not return: it serves until all workers have come to the end of their programs, and
        ends this one.

        Raises:
            AgreedError: on all ranks: the options do not go together, or no worker would remain.
            SystemExit: on servers, at their end.
        """
        workers = connect(self._world or init(), self.options)
        if workers is None:
            sys.exit(0)
        return workers


def pull_rows(optimizer: Any, variable: Any, indices: Any) -> Any:
    """Local: some rows of a variable as its parameter server has them now; the variable here gets them, too.

    For a table of which each batch needs a few rows: with `ParameterServer(rows="pushed")` no others travel, but at
    the ends of epochs, where workers get all that were changed. Also within a `tf.function`.

    Args:
        optimizer: a distributed one.
        variable: one whose gradients are `tf.IndexedSlices`, of shape (rows, ...).
        indices: integers of any shape.

    Returns:
        A tensor (number of indices, ...). Before the first update, and where there are no servers, the rows that the
        variable has here.

    Example:
        >>> optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD())
        >>> table = tf.Variable([[1.0], [2.0], [3.0]])
        >>> mpitrain.pull_rows(optimizer, table, [2, 0]).numpy().tolist()
        [[3.0], [1.0]]
    """
    served = served_of(optimizer)
    if served is None:
        rows = variable if isinstance(variable, tf.Variable) else variable.value
        return tf.gather(rows, tf.reshape(indices, [-1]))
    return served.pull_rows(variable, indices)
