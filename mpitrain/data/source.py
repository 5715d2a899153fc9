"""What a reader hands over, and what training receives.

A reader gives `Samples`: numbered samples that any rank can fetch by position. `assemble` holds out the
validation samples, shuffles and shards, and gives a `DataSource`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from mpitrain.data.sharding import EpochOrder, Indices, hold_out, known_count
from mpitrain.errors import DataError
from mpitrain.runtime.counted import counted


@dataclass(frozen=True)
class Share:
    """Which share of the data is wanted: of which rank, without the samples held out, in which order."""

    validation_split: float
    seed: int
    rank: int
    size: int


@dataclass(frozen=True)
class Preprocessing:
    """What a model's first layers have to do with samples, which are handed over as the files hold them."""

    # the values go from 0 to this number, and are to be divided by it; 1 where they are to be left alone
    scale: float = 1.0
    size: tuple[int, int] | None = None  # (height, width) to which images are brought; None where all have one size


@dataclass(frozen=True)
class Meaning:
    """How a reader has understood the data: for the user, and for the model."""

    inputs: str = ""  # what the samples are, in a few words
    labels: str = ""  # what is to be predicted
    # by class number; None for a regression, or where classes have numbers only
    class_names: tuple[str, ...] | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)  # what the model has to begin with


@dataclass(frozen=True)
class Samples:
    """Numbered samples: `read` turns a dataset of int64 positions into one of (x, y).

    `damaged` tells of the first of some positions whose sample cannot be read; None if all can.
    """

    count: int
    read: Callable[[tf.data.Dataset], tf.data.Dataset]
    damaged: Callable[[Indices], str | None] = lambda positions: None


class Epochs(Protocol):
    """What counts the epochs of a training set, and so decides the order of the next one."""

    epoch: int
    seed: int


@dataclass(frozen=True)
class DataSource:
    """This rank's share of the data, as datasets of single (x, y), not batched.

    x is float32, with the values that the files hold (bytes from 0 to 255; images with a channel axis), y is an int64
    class number, or float32 for a regression. `meaning` says what a model has to begin with. Each iteration of `train`
    is the next epoch, in an order common to all ranks before they take their shares. Counts are of all ranks together.
    `num_classes` is None for a regression. `epochs` tells `train` which epoch is next. `rest(epoch, done)` is this
    rank's share of that epoch after the first `done` samples of its order were taken, by whatever number of ranks. Both
    are None where the order is not known. `deal(rank, size)` deals the same samples out to other ranks.
    `order(epoch, done)` is what `rest` deals out, of all ranks, as positions, and `some(positions)` this rank's share
    of any of these; None where samples have no positions.
    `own_validation`: the validation samples are not held out, but the data brought them.
    `damaged(epoch, done)` looks for a sample of this rank that cannot be read, first in what `rest` deals out, and says
    which.
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
    meaning: Meaning = field(default_factory=Meaning)
    own_validation: bool = False
    damaged: Callable[[int, int], str | None] = lambda epoch, done: None

    def as_info(self) -> dict[str, Any]:
        """Local: for whoever uses the model: what it takes, and what its outputs mean; as JSON can hold it."""
        count, names = self.num_classes, self.meaning.class_names
        classes = None if count is None else list(names or map(str, range(count)))
        return {"inputs": self.meaning.inputs, "labels": self.meaning.labels, "class_names": classes}

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
    meaning: Meaning | None = None,
) -> DataSource:
    """Local: hold out the validation samples, unless the data bring their own, shuffle, and shard."""
    parts = {"validation": validation, "test": test, "meaning": meaning}

    def deal(rank: int, size: int) -> DataSource:
        dealt = replace(share, rank=rank, size=size)
        return assemble(train, dealt, num_classes=num_classes, description=description, **parts)  # type: ignore[arg-type]

    fraction = 0.0 if validation else share.validation_split
    kept, held = hold_out(train.count, fraction, share.seed)
    enough_for_all_ranks(len(kept), share, description)
    held_samples = validation or train
    held = np.arange(validation.count) if validation else held
    order = _order(kept, share, shuffle=True)

    def rest(epoch: int, done: int) -> tf.data.Dataset:
        return _part(train, replace(order, epoch=epoch, done=done))

    def damaged(epoch: int, done: int) -> str | None:
        places = [(train, order.of_epoch(epoch, done)), (train, order.of_epoch(epoch))]
        places.append((held_samples, _order(held, share).of_epoch(0)))
        if test is not None:
            places.append((test, _order(np.arange(test.count), share).of_epoch(0)))
        return next(filter(None, (samples.damaged(positions) for samples, positions in places)), None)

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
        # Of all ranks: who deals out anew has to know what the others would have got.
        order=replace(order, rank=0, size=1).of_epoch,
        some=lambda positions: _part(train, _order(positions, share)),
        meaning=meaning or Meaning(),
        own_validation=validation is not None,
        damaged=damaged,
    )


def enough_for_all_ranks(count: int, share: Share, description: str) -> None:
    """Refuse fewer training samples than ranks.

    Raises:
        DataError: some rank would have nothing to train on.
    """
    if count < max(share.size, 1):
        raise DataError(
            f"{description}: {counted(count, 'training sample')}, too few for {share.size} ranks: "
            f"start at most {counted(count, 'rank')}"
            if count
            else f"{description}: there are no samples to train on: give data with at least one sample"
        )


def _order(positions: Indices, share: Share, shuffle: bool = False) -> EpochOrder:
    return EpochOrder(positions.astype(np.int64), share.seed, share.rank, share.size, shuffle)


def _part(samples: Samples, order: EpochOrder) -> tf.data.Dataset:
    positions = order.dataset()
    return known_count(samples.read(positions), int(positions.cardinality()))
