"""A Keras optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from mpitrain.collectives.conversion import compiled_function
from mpitrain.errors import UsageError
from mpitrain.reduction.buckets import TensorSpec
from mpitrain.reduction.graph import spec_of
from mpitrain.runtime import keras_private
from mpitrain.strategies.joining import Part
from mpitrain.strategies.replicas import has_value, synchronize
from mpitrain.strategies.strategy import Exchange, Update, strategy_of
from mpitrain.strategies.weighting import added_up, are_added_up, current_samples, sample_count, sums
from mpitrain.training.counting import current_share
from mpitrain.training.gradient_use import current_uses
from mpitrain.world.world import World

ATTRIBUTE = "_mpitrain_hook"


def DistributedOptimizer(  # noqa: N802 (the field's name)
    optimizer: Any,
    *,
    world: World | None = None,
    exchange: Exchange | None = None,
    synchronize_first: bool = True,
    loss_is: str = "mean",
) -> Any:
    """Local: make a Keras optimizer average its gradients over all ranks.

    The optimizer itself is changed and returned, never rebuilt: its class, state and serialized form stay plain Keras,
    and a saved model loads without mpitrain. The mean is taken before loss unscaling, clipping, accumulation and
    averaging of weights, so all ranks do those alike; with `gradient_accumulation_steps` it is taken once per update,
    of the accumulated gradients. Before the first update, variables and optimizer state become those of rank 0.

    Calls of `apply`, `apply_gradients` and Keras' `fit` are collective from then on. Make the
    distributed optimizers of a program in the same order on all ranks.

    Args:
        optimizer: a built or new `keras.optimizers.Optimizer`; calling this again changes nothing.
        world: the job; the current one by default.
        exchange: what its gradients go to; the strategy of `world` by default.
        synchronize_first: before the first update, variables and optimizer state become those of rank 0.
        loss_is: what each rank's loss is: a `mean` over its samples, or a `sum`, so that gradients are added up. What
            `sample_count` or the callback `DataParallel` says goes before.

    Returns:
        `optimizer`.

    Raises:
        UsageError: `optimizer` is not a Keras 3 optimizer; or gradients are to be added up by parameter servers.

    Example:
        >>> optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.5))
        >>> weight = keras.Variable([1.0])
        >>> optimizer.apply([tf.constant([1.0])], [weight])
        >>> weight.numpy().tolist()
        [0.5]
    """
    if not callable(getattr(optimizer, "apply", None)) or not hasattr(optimizer, "iterations"):
        raise UsageError(
            f"DistributedOptimizer needs a Keras 3 optimizer, not {type(optimizer).__name__}; "
            "give an object, as in DistributedOptimizer(keras.optimizers.Adam())."
        )
    adds, exchange = sums(loss_is), exchange or strategy_of(world)
    inner = hook_of(optimizer.inner_optimizer) if hasattr(optimizer, "inner_optimizer") else None
    if inner is not None:
        # The mean would be taken twice: by the outer optimizer, then by the inner one.
        inner.remove()
    if strategy_of(exchange.world).exchanges and hook_of(optimizer) is None:
        Hook(optimizer, exchange, synchronize_first, adds).install()
    return optimizer


def hook_of(optimizer: Any) -> Hook | None:
    """Local: what DistributedOptimizer added to `optimizer`, if anything."""
    found: Hook | None = optimizer.__dict__.get(ATTRIBUTE)
    return found


def replicated_state(optimizer: Any) -> list[Any]:
    """Local: variables of a distributed optimizer that are the same on all ranks between any two steps.

    Gradients that are being accumulated are each rank's own, and so is the number of steps since the last update.
    """
    own = [*keras_private.accumulated_gradients(optimizer), keras_private.step_counter(optimizer)]
    hook = hook_of(optimizer)
    excluded = {id(v) for v in own} if hook is not None and hook.accumulation_steps else set()
    return [v for v in optimizer.variables if id(v) not in excluded]


def _no_samples() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0.0, dtype=tf.float64, trainable=False)


class Hook:
    """What is patched into a Keras optimizer: its gradients go to an exchange, which says what is applied.

    Args:
        exchange: what its gradients go to.
        synchronize_first: before the first update, variables and optimizer state become those of rank 0.
        adds: its gradients are added up, see `Update.added_up`.

    Attributes:
        exchange: see above.
        update: what the exchange knows of this optimizer.
        captured: while a list, `apply` only notes the gradients there (see `compiled`).
        compiled: the update where the step is compiled, so that a rank without data makes it with the same bits.
        synchronized: the replicas were made identical before the first update.
        accumulation_steps: steps of which one exchange takes the mean; 0 when every step exchanges.
        accumulated_samples: where gradients are accumulated, of how many samples; a scalar float64 variable.
    """

    accumulated_samples: Any = None

    def __init__(self, optimizer: Any, exchange: Exchange, synchronize_first: bool = True, adds: bool = False) -> None:
        self.optimizer, self.exchange = optimizer, exchange
        self.captured: list[tuple[list[Any], list[Any]]] | None = None
        self.compiled: Update | None = None
        self.synchronized = self._traced = not synchronize_first
        self._checked = False
        self._variables: list[Any] = []
        self._parts: list[Part] = []  # the exchange refers to them weakly
        strategy = strategy_of(exchange.world)
        title = f"update by optimizer {strategy.next_number()} ({type(optimizer).__name__})"
        self.update = Update(title, optimizer.apply, optimizer, self._synchronize, self._without_data, adds)
        exchange.attach(self.update)
        # Inside a LossScaleOptimizer a rank may skip an update that others make, so there the mean
        # is taken outside, for every micro-batch.
        steps = 0 if hasattr(optimizer, "inner_optimizer") else getattr(optimizer, "gradient_accumulation_steps", None)
        self.accumulation_steps = int(steps or 0) if exchange.takes_accumulated else 0
        if hasattr(optimizer, "inner_optimizer"):  # it scales the loss up until gradients overflow
            strategy.finite.may_overflow.add(title)
        if self.accumulation_steps:
            # The first that Keras does with accumulated gradients, once an update: so the mean is taken here, before
            # they are clipped.
            clip = getattr(optimizer, keras_private.CLIP_GRADIENTS)
            self._clipped = replace(self.update, apply=lambda means, variables: clip(means))
            # In a thread of its own: where a tf.function is traced, none may be made in any trace but its first.
            with ThreadPoolExecutor(1) as pool:
                self.accumulated_samples = pool.submit(_no_samples).result()

    def install(self) -> None:
        """Local: patch the optimizer."""
        optimizer = self.optimizer
        patched: dict[str, Any] = {ATTRIBUTE: self, "apply": self.apply}
        if self.accumulation_steps:
            patched[keras_private.CLIP_GRADIENTS] = self._clip_mean
        if not self.exchange.replicates_state:
            patched |= {
                "save_own_variables": self._with_state(optimizer.save_own_variables),
                "finalize_variable_values": self._with_state(optimizer.finalize_variable_values, optimizer.use_ema),
            }
        for name, value in patched.items():
            # object.__setattr__: Keras tracks what is assigned to an optimizer; this is none of its state.
            object.__setattr__(optimizer, name, value)
        self._patched = list(patched)

    def remove(self) -> None:
        """Local: the optimizer is as it was."""
        for name in self._patched:
            object.__delattr__(self.optimizer, name)

    def _with_state(self, method: Callable[..., Any], fetches: bool = True) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if fetches:
                self.exchange.fetch_state(self.update, alone=True)
            return method(*args)

        return call

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Collective: as `Optimizer.apply`, with the gradients of all ranks."""
        if not self._checked or not tf.executing_eagerly():  # not at every eager step: it reads the stack
            self._checked = True
            _refuse_inside_loss_scaling(self.optimizer)
        uses, given = current_uses(), trainable_variables
        if uses is not None:
            uses.check(grads)
        variables = keras_private.trained_variables(self.optimizer) if given is None else list(given)
        if self.captured is not None:
            self.captured.append((list(grads), variables))
            return None
        return self.make(list(grads), variables, self.update)

    def make(self, grads: Sequence[Any], variables: Sequence[Any], update: Update) -> Any:
        """Collective: one update; where gradients are accumulated, with the last of them."""
        with added_up(update.added_up, always=False):
            if not self.accumulation_steps:
                return self.exchange.update(grads, variables, update)
            own = self._accumulated(grads)
            self._variables = [v for g, v in zip(grads, variables, strict=True) if g is not None]
            self.exchange.expect(own, variables, self._clipped)
            return update.apply(own, variables)

    def _accumulated(self, grads: Sequence[Any]) -> list[Any]:
        """Local: gradients as sums over this rank's samples, which are counted."""
        # Of a batch that ranks divide the share: Keras counts all batches alike, however many rows they have.
        share = current_share()
        samples = tf.cast(current_samples() if share is None else share, tf.float64)
        first = next((g for g in grads if g is not None), samples)
        # After a gradient: at the end of data Keras may run a step without any, in which what depends on
        # constants alone is still counted.
        with tf.control_dependencies([first.values if isinstance(first, tf.IndexedSlices) else first]):
            self.accumulated_samples.assign_add(samples)
        # Where they are added up, one of no samples may still have terms of weights, which do not count.
        factor = tf.cast(samples > 0, samples.dtype) if are_added_up() else samples
        return [None if g is None else tf.convert_to_tensor(g) * tf.cast(factor, g.dtype) for g in grads]

    def _clip_mean(self, grads: Sequence[Any]) -> list[Any]:
        """Collective: the mean over the samples of all micro-batches of all ranks, clipped.

        Args:
            grads: sums over this rank's samples, divided by the number of micro-batches, as Keras does.
        """
        samples = self.accumulated_samples.read_value()
        factor = tf.math.divide_no_nan(tf.cast(self.accumulation_steps, tf.float64), samples)
        factor = tf.ones_like(samples) if are_added_up() else factor
        own = [g * tf.cast(factor, g.dtype) for g in grads]
        with sample_count(samples):
            clipped: list[Any] = self.exchange.update(own, self._variables, self._clipped)
        self.accumulated_samples.assign(0.0)
        return clipped

    def _synchronize(self, variables: Sequence[Any]) -> bool:
        """Collective, at the first update and before the first trace: rank 0's variables; True if some were others."""
        world = self.exchange.world
        if not tf.executing_eagerly():
            # A program of XLA holds its variables while it runs: there all is to be done before.
            is_late = compiled_function() is not None and not self.synchronized
            if not self._traced or is_late:
                self._traced, self.synchronized = True, self.synchronized or is_late
                with tf.init_scope():
                    synchronize([v for v in self._state(variables) if has_value(v)], world=world)
            return False
        if self.synchronized:
            return False
        self.synchronized = True
        state = self._state(variables)
        if self._traced:  # which made them alike; and graphs may count the step before its exchange, on some ranks
            both = (self.optimizer, getattr(self.optimizer, "inner_optimizer", self.optimizer))
            counters = {id(keras_private.step_counter(optimizer)) for optimizer in both}
            state = [variable for variable in state if id(variable) not in counters]
        return synchronize(state, world=world)

    def _state(self, variables: Sequence[Any]) -> list[Any]:
        is_shared = self.exchange.is_shared
        state = {id(variable): variable for variable in variables if is_shared(variable)}
        if self.optimizer.built:
            slots = keras_private.slots_of(self.optimizer, lambda variable: not is_shared(variable))
            own = {id(slot) for slot in slots}
            state |= {id(v): v for v in replicated_state(self.optimizer) if id(v) not in own}
        return list(state.values())

    def _without_data(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Part:
        """Local: how this rank makes such an update when it has no data left."""
        specs = [spec_of(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
        kept, adds = list(variables), are_added_up()

        def nothing() -> None:
            zeros = [_zero(spec) for spec in specs]
            with sample_count(0.0), added_up(adds):
                self.make(zeros, kept, self.compiled or self.update)

        # As the others do it, so that it gives the same bits.
        update: Any = nothing
        if not tf.executing_eagerly():
            jit = True if compiled_function() is not None else None
            update = tf.function(nothing, autograph=False, jit_compile=jit)

        def run() -> None:
            if self.accumulation_steps:
                while (int(keras_private.step_counter(self.optimizer).numpy()) + 1) % self.accumulation_steps:
                    update()  # a micro-batch of zeros: no exchange yet
            update()

        def samples() -> float:
            return float(self.accumulated_samples.numpy()) if self.accumulation_steps else 0.0

        self._parts.append(Part(run, samples))
        return self._parts[-1]


def _refuse_inside_loss_scaling(optimizer: Any) -> None:
    """There each rank decides by itself whether to make an update, and the others would wait for it."""
    # Keras tells the inner optimizer nothing of the outer one: the stack does.
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
