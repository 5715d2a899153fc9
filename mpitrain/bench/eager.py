"""Small tensors outside of any graph: what one call costs besides MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from mpitrain.bench.interleave import interleave, mean_of_slowest
from mpitrain.bench.report import Row, median
from mpitrain.world.world import World

BYTES = (4, 4096, 262144)
CALLS = 200


def measure(world: World, sizes: Sequence[int], repeat: int) -> Iterator[Row]:
    """Collective: one row for each number of bytes.

    `mpitrain.all_reduce`, `allreduce` of `mpitrain.horovod` and MPI_Allreduce alone take turns; each measurement is the
    mean of 200 calls in a row on the slowest rank. Sizes are bytes of a float32 tensor, multiples of 4.
    """
    import tensorflow as tf

    import mpitrain.horovod.tensorflow as hvd
    from mpitrain.collectives.operations import all_reduce

    hvd.init()
    for size in sizes:
        tensor, buffer = tf.ones([max(1, size // 4)]), np.ones(max(1, size // 4), np.float32)
        calls: dict[str, Callable[[], object]] = {
            "mpitrain_seconds": partial(all_reduce, tensor, "sum", world=world),
            "horovod_seconds": partial(hvd.allreduce, tensor, op=hvd.Sum),
            "mpi_seconds": partial(world.communicator.all_reduce, buffer),
        }
        for call in calls.values():
            call()
        raw = interleave(
            {name: partial(mean_of_slowest, world.communicator, call, CALLS) for name, call in calls.items()}, repeat
        )
        figures: dict[str, float | None] = {
            "all_reduce ms": median(raw["mpitrain_seconds"]) * 1e3,
            "hvd.allreduce ms": median(raw["horovod_seconds"]) * 1e3,
            "MPI_Allreduce ms": median(raw["mpi_seconds"]) * 1e3,
        }
        yield Row({"bytes": size}, raw, figures)
