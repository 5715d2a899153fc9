"""What one rank's part of a step counts for, where all ranks divide a batch among them.

Sums over samples add up by themselves. What does not is a number that stands for a whole batch, such as a loss that a
`train_step` gives to a `Mean`: there each rank's counts by its share of the rows. And where a batch has fewer rows than
there are ranks, all compute it, and what rank 0 makes of it counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from mpitrain.data.portions import Share, count_rows

_share: contextvars.ContextVar[Any] = contextvars.ContextVar("share", default=None)


@dataclass(frozen=True)
class Counted:
    """What a step gets, and what it counts for."""

    data: Any  # as the model's own step takes it
    samples: Any  # rows that count, a number or a scalar int32 tensor
    # of a number that stands for the whole batch, a scalar float64 tensor; None where no other rank has a part of the
    # batch
    share: Any = None
    counts: Any = ()  # a scalar bool tensor; () where what the step makes of `data` always counts

    @classmethod
    def of(cls, data: Any) -> Counted:
        """Local: of what an iterator gave: a `Share`, or all of it this rank's own."""
        # A method for one batch packs what it is given in a tuple.
        share = data[0] if isinstance(data, tuple) and data and isinstance(data[0], Share) else data
        if not isinstance(share, Share):
            samples = count_rows(data)
            return cls(data, 1 if isinstance(samples, int) and not samples else samples)
        samples = count_rows(share.data)
        if not isinstance(share.counted, tuple):
            samples = tf.where(share.counted, samples, 0)
        part = tf.cast(samples, tf.float64) / tf.cast(tf.maximum(share.total, 1), tf.float64)
        return cls(share.data, samples, part, share.counted)

    @property
    def always(self) -> bool:
        """What the step makes of the data counts, whatever it is."""
        return isinstance(self.counts, tuple)

    @contextlib.contextmanager
    def keeping(self, variables: Callable[[], Sequence[Any]]) -> Iterator[None]:
        """Local: in this context metrics get what counts.

        Args:
            variables: of the metrics, which get back what they had before a step that does not count.
        """
        token = _share.set(self.share)
        before = [] if self.always else [(one, tf.convert_to_tensor(one.value)) for one in variables()]
        try:
            yield
        finally:
            _share.reset(token)
        if self.always:
            return

        def put_back() -> Any:
            for variable, value in before:
                variable.assign(value)
            return tf.constant(0)

        tf.cond(self.counts, lambda: tf.constant(0), put_back)


def current_share() -> Any:
    """Local: this rank's share of the rows of the batch that a step is on; None where no other rank has a part."""
    return _share.get()


def is_count(metric: Any, values: Any) -> bool:
    """Local: whether a number given to a `Sum` is one of rows, which adds up over ranks: no mean is a whole number."""
    return isinstance(metric, keras.metrics.Sum) and tf.is_tensor(values) and values.dtype.is_integer


def weigh_scalars() -> None:
    """Local: patch Keras' `Mean` and `Sum`: in a step, a number without a weight counts by this rank's share."""
    for kind in (keras.metrics.Mean, keras.metrics.Sum):
        _patch_update(kind)


def _patch_update(kind: Any) -> None:
    original = kind.update_state

    @functools.wraps(original)
    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        share = _share.get()
        if share is not None and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = None if is_count(metric, values) else share
        return original(metric, values, sample_weight=sample_weight)

    kind.update_state = update_state
