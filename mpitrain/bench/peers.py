"""The same training step under other libraries, in the same job."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from mpitrain.bench.step import Peer, Step
from mpitrain.bench.workload import loss_and_gradients, optimizer, train_step, workload
from mpitrain.world.world import World

MIRRORED = "MultiWorkerMirroredStrategy"
HOROVOD = "Horovod"


def available() -> tuple[str, ...]:
    """Local: peers that can be imported here; the first comes with TensorFlow."""
    return (MIRRORED, HOROVOD) if importlib.util.find_spec("horovod") else (MIRRORED,)


def start(world: World, names: Sequence[str]) -> dict[str, Peer]:
    """Collective: start peers. Has to come before TensorFlow is used, and once in a process.

    Names are some of `available()`.
    """
    starters = {MIRRORED: _start_mirrored, HOROVOD: _start_horovod}
    return {name: starters[name](world) for name in names}


def cluster(world: World) -> str:
    """Collective: the value of TF_CONFIG that makes each rank a worker."""
    host = world.hosts[world.rank] if len(set(world.hosts)) > 1 else "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        # All ranks have bound theirs when the gathering ends, so those of one host differ.
        workers = world.communicator.all_gather_obj(f"{host}:{probe.getsockname()[1]}")
    task = {"type": "worker", "index": world.rank}
    return json.dumps({"cluster": {"worker": workers}, "task": task})


def _start_mirrored(world: World) -> Peer:
    """Collective: a strategy over all ranks, and steps under it."""
    os.environ["TF_CONFIG"] = cluster(world)
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def make(name: str, batch_size: int) -> Step:
        return _mirrored_step(strategy, name, batch_size, seed=world.rank)

    return make


def _mirrored_step(strategy: Any, name: str, batch_size: int, seed: int) -> Step:
    """Collective: a custom loop; the Keras optimizer, made under the strategy, sums the gradients itself."""
    import tensorflow as tf

    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        load = workload(name, batch_size, seed)
        update = optimizer()
        update.build(load.model.trainable_variables)

    def replica_step(inputs: Any, labels: Any) -> Any:
        loss, gradients = loss_and_gradients(load.model, inputs, labels, 1.0 / replicas)
        update.apply(gradients, load.model.trainable_variables)
        return loss

    @tf.function
    def step(inputs: Any, labels: Any) -> Any:
        # The loss of this rank only: the others print theirs, and no sum of it is needed.
        return strategy.run(replica_step, args=(inputs, labels))

    return lambda: float(strategy.experimental_local_results(step(load.inputs, load.labels))[0])


def _start_horovod(world: World) -> Peer:
    """Collective: Horovod on the same MPI, one all-reduce a gradient, as its own optimizer does."""
    import horovod.tensorflow as hvd

    hvd.init()

    def make(name: str, batch_size: int) -> Step:
        load = workload(name, batch_size, seed=world.rank)
        return train_step(load, optimizer(), lambda gradients: [hvd.allreduce(gradient) for gradient in gradients])

    return make
