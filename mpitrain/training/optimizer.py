"""A Keras optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.reduction.buckets import TensorSpec
from mpitrain.reduction.graph import spec_of
from mpitrain.strategies.exchange import EmptyUpdate, Exchange, exchange_of
from mpitrain.strategies.hooks import ATTRIBUTE, Hook, hook_of
from mpitrain.strategies.replicas import has_value, synchronize
from mpitrain.strategies.weighting import added_up, are_added_up, current_samples, sample_count, sums
from mpitrain.training.counting import current_share
from mpitrain.world.start import current_world
from mpitrain.world.world import World


def DistributedOptimizer(  # noqa: N802 (the field's name)
    optimizer: Any,
    *,
    world: World | None = None,
    exchange: Exchange | None = None,
    synchronize_first: bool = True,
    loss_is: str = "mean",
) -> Any:
    """Local: make a Keras optimizer average its gradients over all ranks.

    The optimizer itself is changed and returned, never rebuilt: its class, state and serialized
    form stay plain Keras, and a saved model loads without mpitrain. The mean is taken before loss
    unscaling, clipping, accumulation and averaging of weights, so all ranks do those alike; with
    `gradient_accumulation_steps` it is taken once per update, of the accumulated gradients. Before
    the first update, variables and optimizer state become those of rank 0.

    Calls of `apply`, `apply_gradients` and Keras' `fit` are collective from then on. Make the
    distributed optimizers of a program in the same order on all ranks.

    Args:
        optimizer: a built or new `keras.optimizers.Optimizer`; calling this again changes nothing.
        world: the job; the current one by default.
        exchange: what takes the mean; that of `world` by default.
        synchronize_first: before the first update, variables and optimizer state become those of rank 0.
        loss_is: what each rank's loss is: a `mean` over its samples, or a `sum`, so that gradients are added up. What
            `sample_count` or the callback `DataParallel` says goes before.

    Returns:
        `optimizer`.

    Raises:
        UsageError: `optimizer` is not a Keras 3 optimizer; or gradients are to be added up by parameter servers.
    """
    if not callable(getattr(optimizer, "apply", None)) or not hasattr(optimizer, "iterations"):
        raise UsageError(
            f"DistributedOptimizer needs a Keras 3 optimizer, not {type(optimizer).__name__}; "
            "give an object, as in DistributedOptimizer(keras.optimizers.Adam())."
        )
    world = exchange.world if exchange else world or current_world()
    if exchange is None and world.parameter_server is not None:
        if sums(loss_is):
            raise UsageError("parameter servers average gradients: divide the loss by the samples of each rank")
        return _served(optimizer, world)
    inner = hook_of(optimizer.inner_optimizer) if hasattr(optimizer, "inner_optimizer") else None
    if inner is not None:
        inner.remove()
    if world.size > 1 and hook_of(optimizer) is None:
        _Hook(optimizer, exchange or exchange_of(world), synchronize_first, sums(loss_is)).install()
    return optimizer


def _served(optimizer: Any, world: World) -> Any:
    """Local: make parameter servers do the updates of an optimizer."""
    from mpitrain.strategies.parameter_server.served import ServedExchange, ServedHook

    inner = hook_of(optimizer.inner_optimizer) if hasattr(optimizer, "inner_optimizer") else None
    if inner is not None:
        inner.remove()
    exchange = exchange_of(world)
    if hook_of(optimizer) is None and isinstance(exchange, ServedExchange):
        ServedHook(optimizer, exchange).install()
    return optimizer


def replicated_state(optimizer: Any) -> list[Any]:
    """Local: variables of a distributed optimizer that are the same on all ranks between any two steps.

    Gradients that are being accumulated are each rank's own, and so is the number of steps since the
    last update.
    """
    own = [*getattr(optimizer, "_accumulated_gradients", []), optimizer._iterations]
    hook = hook_of(optimizer)
    excluded = {id(v) for v in own} if hook is not None and hook.accumulation_steps else set()
    return [v for v in optimizer.variables if id(v) not in excluded]


def slots_of(optimizer: Any, chosen: Callable[[Any], bool]) -> list[Any]:
    """Local: what a built Keras optimizer keeps of each of the chosen variables, such as their momentum."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    known = optimizer._trainable_variables
    positions = [index for index, variable in enumerate(known) if chosen(variable)]
    lists = [
        found
        for found in vars(optimizer).values()
        if isinstance(found, list | tuple) and len(found) == len(known)
        if found is not known and found is not optimizer._variables
    ]
    return [found[index] for found in lists for index in positions]


def _no_samples() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0.0, dtype=tf.float64, trainable=False)


class _Hook(Hook):
    """Gradients become the mean over all ranks."""

    def __init__(self, optimizer: Any, exchange: Exchange, synchronize_first: bool = True, adds: bool = False) -> None:
        super().__init__(optimizer, exchange)
        self._adds = adds
        self.synchronized = self._traced = not synchronize_first
        self._checked = False
        self._apply: Callable[..., Any] = optimizer.apply
        if hasattr(optimizer, "inner_optimizer"):  # it scales the loss up until gradients overflow
            exchange.reducer.finite.may_overflow.add(self._title)
        self._variables: list[Any] = []
        self._empty_updates: list[EmptyUpdate] = []  # the exchange refers to them weakly
        # Inside a LossScaleOptimizer a rank may skip an update that others make, so there the mean
        # is taken outside, for every micro-batch.
        self.accumulation_steps = int(getattr(optimizer, "gradient_accumulation_steps", None) or 0)
        if hasattr(optimizer, "inner_optimizer"):
            self.accumulation_steps = 0
        if self.accumulation_steps:
            # In a thread of its own: where a tf.function is traced, none may be made in any trace but its first.
            with ThreadPoolExecutor(1) as pool:
                self.accumulated_samples = pool.submit(_no_samples).result()

    def install(self) -> None:
        optimizer = self.optimizer
        # object.__setattr__: Keras tracks what is assigned to an optimizer; this is none of its state.
        object.__setattr__(optimizer, ATTRIBUTE, self)
        object.__setattr__(optimizer, "apply", self.apply)
        if self.accumulation_steps:
            clip = optimizer._clip_gradients
            object.__setattr__(optimizer, "_clip_gradients", lambda grads: clip(self._mean_of_accumulated(grads)))

    def remove(self) -> None:
        for name in (ATTRIBUTE, "apply", "_clip_gradients"):
            if name in self.optimizer.__dict__:
                object.__delattr__(self.optimizer, name)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Collective: as `Optimizer.apply`, with the mean of the gradients of all ranks."""
        if not self._checked or not tf.executing_eagerly():  # not at every eager step: it reads the stack
            self._checked = True
            _refuse_inside_loss_scaling(self.optimizer)
        grads = list(grads)
        if trainable_variables is None:
            variables = list(self.optimizer._trainable_variables)
        else:
            trainable_variables = variables = list(trainable_variables)
        if self.captured is not None:
            self.captured.append((grads, variables))
            return None
        with added_up(self._adds, always=False):
            means = self.prepare(grads, variables)
            if not self.exchange.whole_updates:
                return self._apply(means, trainable_variables)
            with tf.control_dependencies(
                [m.values if isinstance(m, tf.IndexedSlices) else m for m in means if m is not None]
            ):
                return self._apply(means, trainable_variables)

    def prepare(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective: the mean of gradients; where they are accumulated, their sum over this rank's samples."""
        if not tf.executing_eagerly() and not self._traced:
            # What the graph reads may be read before its first exchange assigns it.
            self._traced = True
            with tf.init_scope():
                synchronize([v for v in self._state(variables) if has_value(v)], world=self.exchange.world)
        if not self.accumulation_steps:
            self._register(grads, variables)
            return self.exchange.mean(grads, variables, self._title, lambda: self._synchronize(variables))
        # Of a batch that ranks divide the share: Keras counts all batches alike, however many rows they have.
        share = current_share()
        samples = tf.cast(current_samples() if share is None else share, tf.float64)
        first = next((g for g in grads if g is not None), samples)
        # After a gradient: at the end of data Keras may run a step without any, in which what depends on
        # constants alone is still counted.
        with tf.control_dependencies([first.values if isinstance(first, tf.IndexedSlices) else first]):
            self.accumulated_samples.assign_add(samples)
        factor = tf.ones_like(samples) if are_added_up() else samples
        own = [None if g is None else tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in grads]
        self._variables = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        self._register(own, variables)
        return own

    def apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> None:
        """Local: the rest of the update, after the exchange."""
        self._apply(means, variables)

    def _mean_of_accumulated(self, grads: Sequence[Any]) -> list[Any]:
        """Collective: the mean over the samples of all micro-batches of all ranks.

        Args:
            grads: sums over this rank's samples, divided by the number of micro-batches, as Keras does.
        """
        samples = self.accumulated_samples.read_value()
        factor = tf.math.divide_no_nan(tf.cast(self.accumulation_steps, tf.float64), samples)
        factor = tf.ones_like(samples) if are_added_up() else factor
        own = [g * tf.cast(factor, g.dtype) for g in grads]
        variables = self._variables
        with sample_count(samples):
            means = self.exchange.mean(own, variables, self._title, lambda: self._synchronize(variables))
        self.accumulated_samples.assign(0.0)
        return means

    def _synchronize(self, variables: Sequence[Any]) -> bool:
        """Collective, at the first update: rank 0's variables on all ranks; True if some rank had others."""
        if self.synchronized:
            return False
        self.synchronized = True
        state = self._state(variables)
        if self._traced:  # which made them alike; and graphs may count the step before its exchange, on some ranks
            both = (self.optimizer, getattr(self.optimizer, "inner_optimizer", self.optimizer))
            counters = {id(optimizer._iterations) for optimizer in both}
            state = [variable for variable in state if id(variable) not in counters]
        return synchronize(state, world=self.exchange.world)

    def _state(self, variables: Sequence[Any]) -> list[Any]:
        state = {id(variable): variable for variable in variables if self.exchange.is_shared(variable)}
        if self.optimizer.built:
            own = {id(slot) for slot in slots_of(self.optimizer, lambda v: not self.exchange.is_shared(v))}
            state |= {id(v): v for v in replicated_state(self.optimizer) if id(v) not in own}
        return list(state.values())

    def _register(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Tell the exchange how to make this update when this rank has no data left."""
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        if not pairs:
            return
        kept = [variable for _, variable in pairs]
        plan = self.exchange.plan_update([gradient for gradient, _ in pairs], kept, self._title)
        if self.exchange.knows(plan.call):
            return
        specs, adds = [spec_of(gradient, variable) for gradient, variable in pairs], are_added_up()

        def nothing() -> None:
            zeros = [_zero(spec) for spec in specs]
            with sample_count(0.0), added_up(adds):
                if self.compiled_update is not None:
                    self.compiled_update(self.prepare(zeros, kept))
                else:
                    self.apply(zeros, kept)

        # As the others do it, so that it gives the same bits.
        update = nothing if tf.executing_eagerly() else tf.function(nothing, autograph=False)

        def catch_up() -> None:
            if self.accumulation_steps:
                while (int(self.optimizer._iterations.numpy()) + 1) % self.accumulation_steps:
                    update()  # a micro-batch of zeros: no exchange yet
            update()

        def samples() -> float:
            return float(self.accumulated_samples.numpy()) if self.accumulation_steps else 0.0

        empty = EmptyUpdate(catch_up, samples)
        self._empty_updates.append(empty)
        self.exchange.register_empty_update(plan.call, empty)


def _refuse_inside_loss_scaling(optimizer: Any) -> None:
    """There each rank decides by itself whether to make an update, and the others would wait for it."""
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller.inner_optimizer is optimizer:
            raise UsageError(
                "DistributedOptimizer was given the optimizer inside a LossScaleOptimizer, where ranks may skip "
                "different steps. Give it the LossScaleOptimizer: call DistributedOptimizer(model.optimizer) after "
                "compile(), which makes one under mixed_float16, or use the callback DataParallel."
            )
        frame = frame.f_back  # type: ignore[assignment]


def _zero(spec: TensorSpec) -> Any:
    if not spec.sparse:
        return tf.zeros(spec.shape, spec.dtype)
    values = tf.zeros((0, *spec.shape[1:]), spec.dtype)
    return tf.IndexedSlices(values, tf.zeros((0,), tf.int64), tf.constant(spec.shape, tf.int64))
