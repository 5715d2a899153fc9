"""A Keras optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mpitrain.comm.world import World, current_world
from mpitrain.errors import UsageError
from mpitrain.reduction.buckets import TensorSpec, plan_buckets
from mpitrain.reduction.graph import spec_of
from mpitrain.training.exchange import Exchange, exchange_of, sample_count
from mpitrain.training.replicas import synchronize

ATTRIBUTE = "_mpitrain_hook"


def DistributedOptimizer(optimizer: Any, *, world: World | None = None) -> Any:  # noqa: N802 (the field's name)
    """Local: make a Keras optimizer average its gradients over all ranks.

    The optimizer itself is changed and returned, never rebuilt: its class, state and serialized
    form stay plain Keras, and a saved model loads without mpitrain. The mean is taken before loss
    unscaling, clipping, accumulation and averaging of weights, so all ranks do those alike; with
    `gradient_accumulation_steps` it is taken once per update, of the accumulated gradients. Before
    the first update, variables and optimizer state become those of rank 0.

    Calls of `apply`, `apply_gradients` and Keras' `fit` are collective from then on.

    Args:
        optimizer: a built or new `keras.optimizers.Optimizer`; calling this again changes nothing.
        world: the job; the current one by default.

    Returns:
        `optimizer`.

    Raises:
        UsageError: `optimizer` is not a Keras 3 optimizer.
    """
    if not callable(getattr(optimizer, "apply", None)) or not hasattr(optimizer, "iterations"):
        raise UsageError(
            f"DistributedOptimizer needs a Keras 3 optimizer, not {type(optimizer).__name__}; "
            "give an object, as in DistributedOptimizer(keras.optimizers.Adam())."
        )
    world = world or current_world()
    if world.size > 1 and hook_of(optimizer) is None:
        _Hook(optimizer, exchange_of(world)).install()
    return optimizer


def hook_of(optimizer: Any) -> _Hook | None:
    """Local: what DistributedOptimizer added to `optimizer`, if anything."""
    return optimizer.__dict__.get(ATTRIBUTE)


class _Hook:
    """What is patched into one optimizer.

    Attributes:
        captured: while a list, `apply` only notes the gradients there (see `jit`).
    """

    def __init__(self, optimizer: Any, exchange: Exchange) -> None:
        self.exchange = exchange
        self.optimizer = optimizer
        self.captured: list[tuple[list[Any], list[Any]]] | None = None
        self._apply: Callable[..., Any] = optimizer.apply
        self._synchronized = False
        self._variables: list[Any] = []
        # Inside a LossScaleOptimizer a rank may skip an update that others make, so there the mean
        # is taken outside, for every micro-batch.
        self.accumulation_steps = int(getattr(optimizer, "gradient_accumulation_steps", None) or 0)
        if hasattr(optimizer, "inner_optimizer"):
            self.accumulation_steps = 0

    def install(self) -> None:
        optimizer = self.optimizer
        # object.__setattr__: Keras tracks what is assigned to an optimizer; this is none of its state.
        object.__setattr__(optimizer, ATTRIBUTE, self)
        object.__setattr__(optimizer, "apply", self.apply)
        if self.accumulation_steps:
            clip = optimizer._clip_gradients
            object.__setattr__(optimizer, "_clip_gradients", lambda grads: clip(self._mean(grads, self._variables)))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Collective: as `Optimizer.apply`, with the mean of the gradients of all ranks."""
        grads = list(grads)
        if trainable_variables is None:
            variables = list(self.optimizer._trainable_variables)
        else:
            variables = list(trainable_variables)
        if self.captured is not None:
            self.captured.append((grads, variables))
            return None
        return self._apply(self.prepare(grads, variables), trainable_variables and variables)

    def prepare(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective: the mean of gradients, or where they are accumulated, the gradients as they are."""
        if not self.accumulation_steps:
            return self._mean(grads, variables)
        self._variables = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        self._register(grads, variables)
        return list(grads)

    def apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> None:
        """Local: the rest of the update, after the exchange."""
        self._apply(means, variables)

    def _mean(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.accumulation_steps:
            self._register(grads, variables)
        return self.exchange.mean(grads, variables, lambda: self._synchronize(variables))

    def _synchronize(self, variables: Sequence[Any]) -> bool:
        """Collective, at the first update: rank 0's variables on all ranks; True if some rank had others."""
        if self._synchronized:
            return False
        self._synchronized = True
        state = [*variables, *(self.optimizer.variables if self.optimizer.built else [])]
        return synchronize(_unique(state), world=self.exchange.world)

    def _register(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Tell the exchange how to make this update when this rank has no data left."""
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        description = plan_buckets([spec_of(gradient, variable) for gradient, variable in pairs]).description
        if not pairs or self.exchange.knows(description):
            return
        kept = [variable for _, variable in pairs]
        zeros = [functools.partial(_zero, spec_of(gradient, variable)) for gradient, variable in pairs]

        @tf.function
        def nothing() -> None:
            with sample_count(0.0):
                self.apply([zero() for zero in zeros], kept)

        self.exchange.register_empty_update(description, lambda: self._catch_up(nothing))

    def _catch_up(self, nothing: Callable[[], None]) -> None:
        if self.accumulation_steps:
            while (int(self.optimizer._iterations.numpy()) + 1) % self.accumulation_steps:
                nothing()  # a micro-batch of zeros: no exchange yet
        nothing()


def _zero(spec: TensorSpec) -> Any:
    if not spec.sparse:
        return tf.zeros(spec.shape, spec.dtype)
    values = tf.zeros((0, *spec.shape[1:]), spec.dtype)
    return tf.IndexedSlices(values, tf.zeros((0,), tf.int64), tf.constant(spec.shape, tf.int64))


def _unique(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
