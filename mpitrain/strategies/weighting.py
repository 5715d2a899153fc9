"""What the gradients of one rank count for beside those of the others."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from mpitrain.errors import UsageError

_samples: contextvars.ContextVar[Any] = contextvars.ContextVar("samples", default=1.0)
_added_up: contextvars.ContextVar[Callable[[], bool] | None] = contextvars.ContextVar("added_up", default=None)


@contextlib.contextmanager
def sample_count(samples: Any, loss_is: str | None = None) -> Iterator[None]:
    """Local: gradients exchanged inside this context stand for `samples` samples.

    Ranks' means are weighted by it, so that ranks with batches of different sizes give the exact
    mean of the global batch. Without it all ranks weigh the same.

    Args:
        samples: what this rank's loss was divided by: the rows of its batch, or the steps that are not masked, or
            the sum of sample weights; a number, or a scalar tensor of the graph being traced.
        loss_is: `mean`: as said; `sum`: over rows, so that gradients are added up; None: as it is outside.

    Raises:
        UsageError: another `loss_is`.

    Example:
        >>> optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD())
        >>> with mpitrain.sample_count(17):  # a batch that has fewer rows than those of other ranks
        ...     optimizer.apply([tf.constant([1.0])], [keras.Variable([1.0])])
    """
    token = _samples.set(samples)
    try:
        with contextlib.nullcontext() if loss_is is None else added_up(sums(loss_is)):
            yield
    finally:
        _samples.reset(token)


def sums(loss_is: str) -> bool:
    """Local: whether a loss is a sum over samples, and no mean.

    Raises:
        UsageError: `loss_is` is neither mean nor sum.
    """
    if loss_is not in ("mean", "sum"):
        raise UsageError(f"loss_is is {loss_is!r}: choose mean or sum")
    return loss_is == "sum"


@contextlib.contextmanager
def added_up(when: Callable[[], bool] | bool, always: bool = True) -> Iterator[None]:
    """Local: gradients exchanged inside this context are added up, not averaged, if `when` says so then.

    Args:
        when: see above.
        always: also where another such context around this one has said it already.
    """
    if not always and _added_up.get() is not None:
        yield
        return
    token = _added_up.set(when if callable(when) else lambda: when)
    try:
        yield
    finally:
        _added_up.reset(token)


def keep_added_up(when: bool) -> None:
    """Local: from now on gradients are added up wherever nothing else is said; or, as at first, averaged."""
    _added_up.set((lambda: True) if when else None)


def are_added_up() -> bool:
    """Local: whether gradients are added up here."""
    when = _added_up.get()
    return when is not None and when()


def keep_sample_count(samples: Any) -> None:
    """Local: from now on `samples` holds wherever no `sample_count` does.

    Args:
        samples: as for `sample_count`; a variable is read at each exchange.
    """
    _samples.set(samples)


def current_samples() -> Any:
    """Local: the number that `sample_count` or `keep_sample_count` set, or 1."""
    return _samples.get()


def gradient_weight() -> Any:
    """Local: how much this rank's gradients count beside those of the others, times any number that all have."""
    return 1.0 if are_added_up() else current_samples()
