"""The contract of what combines the tensors of all ranks, eagerly and inside `tf.function`.

To add an engine, write one class with these methods in a file of its own, and name it in `registry.ENGINES`;
`tests/contracts/engine.py` then runs with it. `one_rank.py` is the smallest one, `host_engine.py` the one in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from mpitrain.collectives.bucket import Bucket
from mpitrain.collectives.host import Reduction
from mpitrain.comm.communicator import Buffer
from mpitrain.native.library import Library

# exchange(index, arrays, samples): the host's side of an update, see `CollectiveEngine.average`.
HostSide = Callable[[int, Sequence[Buffer], float], list[Buffer]]


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do."""

    devices: frozenset[str]  # kinds of devices, `CPU` or `GPU`, from which it takes tensors without a copy to the host
    dtypes: frozenset[str]  # names of those that it reduces
    ops: frozenset[str]  # reductions, see `Reduction.op`; it has `sum` and `mean` at least
    # why `average` of dense gradients may not stand in what `jit_compile=True` compiles; None where it may
    not_in_xla: str | None = "gradients are exchanged by Python"


class Averaging(Protocol):
    """The buckets of one update, which an engine averages one after the other; see `CollectiveEngine.average`.

    Attributes:
        engine: for the other collectives, which a compressor may need in between.
    """

    engine: CollectiveEngine

    def mean(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Collective: the next bucket's mean over the samples of all ranks, or the sum, in the dtypes of `tensors`.

        Args:
            tensors: its members, in order; of a sparse one values (n, ...) and row numbers (n,), where n may differ
                between ranks. What comes back then are the rows of the mean.
        """
        ...

    def share(self) -> tf.Tensor:
        """Collective: instead of `mean`, where the caller exchanges the next bucket by itself: this rank's share in it.

        Values that are not finite are then for the caller to find.

        Returns:
            A scalar float64: with it as factor on each rank, the sum over ranks is the mean.
        """
        ...


class CollectiveEngine(Protocol):
    """Combines tensors of all ranks of one `World`, with which it is made. It knows no gradients.

    All methods are collective, and work at once where TensorFlow is eager, else as nodes of the graph being traced.
    A graph runs its collectives on all ranks in one order, that in which they were traced, however deep in branches
    and nested functions they stand (`ordering.in_turn` sees to it). The caller sets static shapes of results, and
    looks at arguments; `name` is the user's, for messages.

    MPI pairs what ranks call by order alone, so each call is agreed on first: `world.agreement.call` raises
    MismatchError on all ranks where they differ, which in a graph must become `tf.errors.FailedPreconditionError`
    (`ordering.checked_call`). An error of what carries the tensors is one of `errors`, and reaches every rank: none
    waits for one that has failed.

    Attributes:
        library: machine code that the host's side may use, too; None where it is Python's alone.
    """

    library: Library | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; tests ask for nothing else."""
        ...

    def all_reduce(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        """Collective: the reduction over ranks, the same bits on all; see `operations.all_reduce`."""
        ...

    def all_gather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Collective: the rows of all ranks, in rank order; their numbers may differ. A scalar is one row."""
        ...

    def broadcast(self, tensor: tf.Tensor, root: int, name: str | None = None) -> tf.Tensor:
        """Collective: rank `root`'s tensor, of equal shape and dtype on all."""
        ...

    def reduce_scatter(self, tensor: tf.Tensor, how: Reduction, name: str | None = None) -> tf.Tensor:
        """Collective: this rank's rows of the reduction; where they do not divide, earlier ranks get one more."""
        ...

    def all_to_all(
        self, tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Collective: `splits[i]` rows go to rank i, or equal parts.

        Returns:
            The rows received, in rank order, and int32 (size,) how many came from each rank.
        """
        ...

    def average(
        self, exchange: HostSide, buckets: Sequence[Bucket], samples: tf.Tensor, body: Callable[[Averaging], None]
    ) -> None:
        """Collective: one update: `body` is called once, at once, and takes the buckets in order.

        What of an update is the same for all engines is the host's side: a header that comes with the first bucket
        (agreement, samples, ranks out of data, identical replicas), the order, weights, statistics, the search for
        values that are not finite, and what the watchdog sees. An engine may do that in one call a bucket and leave
        all of it to `exchange`; one that sums by itself, on a device, calls it for the bucket without arrays, and
        gets this rank's share to multiply with. It runs when the graph runs, on the host.

        Args:
            exchange: takes the number of a bucket, its arrays (as `Averaging.mean` has them; all of a flat bucket
                may be one array in its dtype) and this rank's samples. Returns arrays like them with the mean; given
                none, one with the share.
            buckets: the same on all ranks.
            samples: a scalar float64, how many stand behind this rank's tensors.
            body: traces the update.
        """
        ...
