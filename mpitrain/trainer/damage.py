"""Names the sample that stopped a training because it cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from mpitrain.checkpoint.options import Position
from mpitrain.data.source import DataSource
from mpitrain.errors import DataError


@contextmanager
def locate_damaged_sample(source: DataSource, position: Callable[[], Position]) -> Iterator[None]:
    """Local: when TensorFlow fails within, look whether it is for a sample of this rank.

    TensorFlow tells that a picture cannot be decoded, but not which. So samples are read again, beginning where the
    training has come to.

    Raises:
        DataError: names the sample.
    """
    try:
        yield
    except tf.errors.OpError as error:
        reached = position()
        found = source.damaged(reached.epoch, reached.samples)
        if found is None:
            raise
        raise DataError(found) from error
