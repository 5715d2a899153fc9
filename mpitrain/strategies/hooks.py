"""What is patched into an optimizer that is distributed, whoever makes its updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mpitrain.strategies.exchange import Exchange

ATTRIBUTE = "_mpitrain_hook"


class Hook:
    """The optimizer's side of an exchange.

    Attributes:
        optimizer: which is patched.
        exchange: what its gradients go through.
        captured: while a list, `apply` only notes the gradients there (see `compiled`).
        compiled_update: applies what `prepare` gave where the step is compiled, so that a rank without data does it
            with the same bits.
        synchronized: the replicas were made identical before the first update.
        accumulation_steps: steps of which one exchange takes the mean; 0 when every step exchanges.
        accumulated_samples: where gradients are accumulated, of how many samples; a scalar float64 variable.
        served: parameter servers make the updates, and have the optimizer's state.
    """

    accumulation_steps = 0
    accumulated_samples: Any = None
    served = False

    def __init__(self, optimizer: Any, exchange: Exchange) -> None:
        self.optimizer, self.exchange = optimizer, exchange
        self.captured: list[tuple[list[Any], list[Any]]] | None = None
        self.compiled_update: Callable[[list[Any]], None] | None = None
        self.synchronized = False
        self._title = f"update by optimizer {exchange.next_number()} ({type(optimizer).__name__})"

    def prepare(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective: what `apply_means` takes, for each gradient; None stays None."""
        raise NotImplementedError

    def apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> None:
        """Local: change the variables."""
        raise NotImplementedError

    def remove(self) -> None:
        """Local: the optimizer is as it was."""
        raise NotImplementedError

    def begin_anew(self) -> None:
        """Local, on all ranks: variables may have been changed since the last update."""

    def fetch_state(self) -> None:
        """Local: the optimizer's own variables are up to date here."""

    def counts(self) -> dict[str, Any]:
        """Local: what parameter servers have counted."""
        return {}

    def pull_rows(self, variable: Any, indices: Any) -> Any:
        """Local: see `servers.pull_rows`."""
        return own_rows(variable, indices)


def own_rows(variable: Any, indices: Any) -> Any:
    """Local: some rows of a variable, as they are here: a tensor (number of indices, ...)."""
    return tf.gather(getattr(variable, "value", variable), tf.reshape(indices, [-1]))


def hook_of(optimizer: Any) -> Hook | None:
    """Local: what DistributedOptimizer added to `optimizer`, if anything."""
    found: Hook | None = optimizer.__dict__.get(ATTRIBUTE)
    return found
