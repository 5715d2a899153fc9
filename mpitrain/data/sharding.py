"""Which elements of an epoch does this rank take, and in which order.

The order of an epoch depends on the seed, the epoch's number and the number of samples alone: not on
`tf.random.set_seed`, which scripts like to set differently on each rank. So every rank computes the same global
order, and element i of it belongs to rank `i % size`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted

Indices = NDArray[np.int64]


def shard(dataset: tf.data.Dataset, rank: int, size: int) -> tf.data.Dataset:
    """Local: every `size`-th element of a dataset, beginning with element `rank`.

    Apply it to single samples (before `batch`), in an order that is the same on all ranks: shuffle with a
    fixed seed before, or without one after.

    Raises:
        DataError: the rank is not in [0, size).
    """
    if not 0 <= rank < size:
        raise DataError(f"rank {rank} cannot take a share among {size} ranks: ranks are numbered 0 to size - 1")
    return dataset.shard(size, rank)


def shuffle_seeds(dataset: Any) -> list[tuple[int, int]]:
    """Local: those by which the elements of a dataset are shuffled; two zeros where the system draws them anew."""
    own = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    found = [] if own[0] is None or own[1] is None else [(int(own[0]), int(own[1]))]
    for one in dataset._inputs() if hasattr(dataset, "element_spec") else ():
        found += shuffle_seeds(one)
    return found


def share_count(count: int, rank: int, size: int) -> int:
    """How many of `count` elements rank `rank` takes: shares differ by at most one."""
    return (count - rank + size - 1) // size


def hold_out(count: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Split positions 0..count-1 at random into (training, validation), each in ascending order.

    Depends on `count`, `fraction` and `seed` alone, so all ranks hold out the same samples.

    Raises:
        DataError: the fraction is not in [0, 1), or leaves nothing to train on.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"the validation split is {fraction}: give a fraction of at least 0 and below 1")
    held = round(count * fraction)
    if count and held == count:
        raise DataError(
            f"a validation split of {fraction} leaves none of {counted(count, 'sample')} to train on: make it smaller"
        )
    # The second number keeps apart what is drawn from one seed: 1 what is held out, 2 orders, 3 seeds of streams.
    order = np.random.default_rng([seed, 1]).permutation(count)
    return np.sort(order[held:]).astype(np.int64), np.sort(order[:held]).astype(np.int64)


@dataclass
class EpochOrder:
    """One rank's positions, epoch after epoch; each iteration is the next epoch.

    All ranks must begin equally many epochs. Set `epoch` to resume at a later one, and `done` where the
    first `done` elements of that epoch's global order were taken before, by whatever number of ranks.
    """

    positions: Indices
    seed: int
    rank: int = 0
    size: int = 1
    shuffle: bool = True
    epoch: int = field(default=0)
    done: int = field(default=0)

    def of_epoch(self, epoch: int, done: int = 0) -> Indices:
        """This rank's share of the epoch's global order, or of what is left of it after `done` elements."""
        order = self.positions
        if self.shuffle:
            order = np.random.default_rng([self.seed, 2, epoch]).permutation(self.positions)
        return order[done + self.rank :: self.size]

    def __call__(self) -> Iterator[Indices]:
        """Yield the whole share of the next epoch as one array (so Python runs once an epoch)."""
        # Counted at the beginning: ranks that stop in mid-epoch have begun as many as the others.
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield self.of_epoch(epoch, self.done)

    def dataset(self) -> tf.data.Dataset:
        """The positions as a dataset of int64 scalars, in the next epoch's order at each iteration."""
        whole = tf.data.Dataset.from_generator(self, output_signature=tf.TensorSpec([None], tf.int64))
        return known_count(whole.unbatch(), share_count(len(self.positions) - self.done, self.rank, self.size))


def known_count(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """The same dataset, with `len()` known to be `count`."""
    return dataset.apply(tf.data.experimental.assert_cardinality(count))


def shuffled(dataset: tf.data.Dataset, buffer: int, seeds: EpochSeeds) -> tf.data.Dataset:
    """Shuffle a stream through a buffer, in a new order each iteration that `seeds` alone decides.

    Unlike `Dataset.shuffle` this does not depend on `tf.random.set_seed`.
    """
    specification = dataset.element_spec
    flat = tf.nest.flatten(specification)

    def order(pair: tf.Tensor) -> tf.data.Dataset:
        variant: Any = tf.raw_ops.ShuffleDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            buffer_size=tf.constant(max(buffer, 1), tf.int64),
            seed=pair[0],
            seed2=pair[1],
            output_types=[spec.dtype for spec in flat],
            output_shapes=[spec.shape for spec in flat],
            reshuffle_each_iteration=False,
        )
        return tf.data.experimental.from_variant(variant, specification)

    return tf.data.Dataset.from_generator(seeds, output_signature=tf.TensorSpec([2], tf.int64)).flat_map(order)


@dataclass
class EpochSeeds:
    """Two numbers an epoch, from which a stream's order follows; each iteration is the next epoch."""

    seed: int
    epoch: int = field(default=0)

    def __call__(self) -> Iterator[Indices]:
        """Yield the next epoch's pair of seeds."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        # From 1 on: two zeros would have TensorFlow take a seed from the system.
        yield np.random.default_rng([self.seed, 3, epoch]).integers(1, 2**31, size=2, dtype=np.int64)


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Local: the dataset without TensorFlow's thread that tunes it while it runs.

    Dropping an iterator waits for that thread, which now and then sleeps on for half a minute (seen with
    TensorFlow 2.21: one of about a hundred iterators), while the other ranks wait for this one.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
