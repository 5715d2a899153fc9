"""What a reader hands over, and what training receives.

A reader gives `Samples`: numbered samples that any rank can fetch by position. `assemble` holds out the
validation samples, shuffles and shards, and gives a `DataSource`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import tensorflow as tf

from mpitrain.data.sharding import EpochOrder, Indices, hold_out, known_count
from mpitrain.errors import DataError


@dataclass(frozen=True)
class Share:
    """Which share of the data is wanted: of which rank, without the samples held out, in which order."""

    validation_split: float
    seed: int
    rank: int
    size: int


@dataclass(frozen=True)
class Samples:
    """Numbered samples: `read` turns a dataset of int64 positions into one of (x, y)."""

    count: int
    read: Callable[[tf.data.Dataset], tf.data.Dataset]


class Epochs(Protocol):
    """What counts the epochs of a training set, and so decides the order of the next one."""

    epoch: int
    seed: int


@dataclass(frozen=True)
class DataSource:
    """This rank's share of the data, as datasets of single (x, y), not batched.

    x is float32 (images scaled to [0, 1], with a channel axis), y is an int64 class number, or float32 for a
    regression. Each iteration of `train` is the next epoch, in an order common to all ranks before they take
    their shares. Counts are of all ranks together. `num_classes` is None for a regression. `epochs` tells `train`
    which epoch is next. `rest(epoch, done)` is this rank's share of that epoch after the first `done` samples of its
    order were taken, by whatever number of ranks. Both are None where the order is not known.
    `deal(rank, size)` deals the same samples out to other ranks. `order(epoch, done)` is what `rest` deals out, of all
    ranks, as positions, and `some(positions)` this rank's share of any of these; None where samples have no positions.
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    test: tf.data.Dataset | None
    train_count: int
    validation_count: int
    test_count: int
    num_classes: int | None
    description: str
    epochs: Epochs | None = None
    rest: Callable[[int, int], tf.data.Dataset] | None = None
    deal: Callable[[int, int], DataSource] | None = None
    order: Callable[[int, int], Indices] | None = None
    some: Callable[[Indices], tf.data.Dataset] | None = None

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """Shape of one x."""
        return tuple(self.train.element_spec[0].shape.as_list())

    @property
    def label_shape(self) -> tuple[int | None, ...]:
        """Shape of one y: () for class numbers."""
        return tuple(self.train.element_spec[1].shape.as_list())


def assemble(
    train: Samples,
    share: Share,
    *,
    num_classes: int | None,
    description: str,
    validation: Samples | None = None,
    test: Samples | None = None,
) -> DataSource:
    """Local: hold out the validation samples, unless the data bring their own, shuffle, and shard."""

    def deal(rank: int, size: int) -> DataSource:
        dealt = replace(share, rank=rank, size=size)
        return assemble(
            train, dealt, num_classes=num_classes, description=description, validation=validation, test=test
        )

    fraction = 0.0 if validation else share.validation_split
    kept, held = hold_out(train.count, fraction, share.seed)
    enough_for_all_ranks(len(kept), share, description)
    held_samples = validation or train
    held = np.arange(validation.count) if validation else held
    order = _order(kept, share, shuffle=True)

    def rest(epoch: int, done: int) -> tf.data.Dataset:
        return _part(train, replace(order, epoch=epoch, done=done))

    return DataSource(
        train=_part(train, order),
        validation=_part(held_samples, _order(held, share)) if len(held) else None,
        test=_part(test, _order(np.arange(test.count), share)) if test and test.count else None,
        train_count=len(kept),
        validation_count=len(held),
        test_count=test.count if test else 0,
        num_classes=num_classes,
        description=description,
        epochs=order,
        rest=rest,
        deal=deal,
        order=replace(order, rank=0, size=1).of_epoch,
        some=lambda positions: _part(train, _order(positions, share)),
    )


def enough_for_all_ranks(count: int, share: Share, description: str) -> None:
    """Refuse fewer training samples than ranks.

    Raises:
        DataError: some rank would have nothing to train on.
    """
    if count < max(share.size, 1):
        raise DataError(
            f"{description}: {count} training samples are too few for {share.size} ranks: start at most {count} ranks"
            if count
            else f"{description}: there are no samples to train on: give data with at least one sample"
        )


def _order(positions: Indices, share: Share, shuffle: bool = False) -> EpochOrder:
    return EpochOrder(positions.astype(np.int64), share.seed, share.rank, share.size, shuffle)


def _part(samples: Samples, order: EpochOrder) -> tf.data.Dataset:
    positions = order.dataset()
    return known_count(samples.read(positions), int(positions.cardinality()))
