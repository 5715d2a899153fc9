"""Losses that are no mean over rows: in each step they become this rank's share of the loss of all ranks' rows.

What a rank computes is weighted by its samples, when gradients are averaged and when Keras reports losses. So a mean
over rows is exact without anything more. A term with another denominator (steps that are not masked, the sum of sample
weights, none at all) is multiplied by what makes its weighted mean over ranks the term of the whole batch, for which
ranks add up their denominators. A loss of which only the whole batch makes sense gets the rows of all ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from mpitrain.runtime import keras_private
from mpitrain.runtime.keras_private import patch
from mpitrain.strategies.strategy import Strategy
from mpitrain.strategies.weighting import added_up, current_samples, gradient_weight
from mpitrain.training.batch_moments import moments
from mpitrain.training.counting import current_share
from mpitrain.training.row_losses import RowLosses
from mpitrain.training.step_collectives import StepCollectives
from mpitrain.world.world import World

LossIs = Literal["mean", "sum", "whole"]
UNREDUCED = (None, "none")
OF_SERVERS = (
    "parameter servers average gradients by rows, but a loss of this model divides by something else (a mask, sample "
    'weights, reduction="sum" or None): it is not that of the whole batch, as --strategy all-reduce would make it'
)
MOMENTS_OF_SERVERS = (
    "workers of parameter servers do not wait for each other in a step: BatchNormalization(synchronized=True) takes "
    "the moments of each worker's own rows; --strategy all-reduce takes those of all"
)
Reduce = Callable[..., Any]
_current: contextvars.ContextVar[Step | None] = contextvars.ContextVar("step", default=None)
_kept: contextvars.ContextVar[StepCollectives | None] = contextvars.ContextVar("kept", default=None)


class Shares:
    """How the losses of one model are divided among the ranks.

    Args:
        active: whether all ranks run a step; asked at each run.
    """

    def __init__(self, model: Any, strategy: Strategy, active: Callable[[], bool]) -> None:
        _install()
        # what a loss of the script's own is, and one that Keras computes of a whole batch: a `mean` over this rank's
        # rows, a `sum` over them, or a number of the `whole` batch, for which rows are gathered. None where the ranks
        # do not have rows of one batch
        self.loss_is: LossIs | None = "mean"
        self.sync_batch_norm = False  # batch normalization uses the moments of all ranks' rows
        self.collectives = StepCollectives(strategy.world, active)
        self.model, self._strategy = model, strategy
        self._told: set[str] = set()
        self.row_losses = RowLosses(self.tell)

    @contextlib.contextmanager
    def step(self, training: bool) -> Iterator[None]:
        """Local: what is computed inside is a step of the model on this rank's samples, see `sample_count`."""
        if self.loss_is is None:
            yield
            return
        step = Step(self, training)
        token = _current.set(step)
        try:
            # A function: whether Keras is asked for the loss is known only when gradients are exchanged.
            with added_up(step.adds_gradients):
                yield
        finally:
            _current.reset(token)
        if training and step.is_own and not step.computed_by_keras:
            self.tell_of_assumption(f"the loss of {self.model.name}, which computes it itself,")

    @property
    def synchronized_layers(self) -> list[Any]:
        """Layers that take the moments of all ranks' rows."""
        layers = keras_private.layers_within(self.model)
        found = [one for one in layers if isinstance(one, keras.layers.BatchNormalization)]
        return [] if self.served else [one for one in found if self.sync_batch_norm or one.synchronized]

    @property
    def served(self) -> bool:
        """Parameter servers average gradients, and workers do not take their steps together."""
        return not self._strategy.lockstep

    def tell_of_assumption(self, what: str) -> None:
        """Local: where the whole batch was asked for: what nobody can know."""
        if self.loss_is == "whole":
            self.tell(taken_for_a_mean(what))

    def tell(self, text: str) -> None:
        """Local: once, on rank 0."""
        if self._strategy.world.is_root and text not in self._told:
            sys.stderr.write(f"mpitrain: {text}\n")
        self._told.add(text)


def taken_for_a_mean(what: str) -> str:
    """Local: the sentence on a loss of which nothing is known."""
    remedy = 'if it is a sum over them, divided by what the script likes, give --loss-is sum (loss_is="sum")'
    return f"{what} is taken for a mean over the rows of a batch: {remedy}"


def keep_batch_norm_synchronized(world: World | None) -> None:
    """Local: from now on batch normalization uses the moments of all ranks' rows, in steps of the script's own too.

    Args:
        world: the ranks; None for each rank's own moments, as at first.
    """
    _install()
    _kept.set(None if world is None else StepCollectives(world))


class Step:
    """One step that is run, or traced, on this rank.

    Attributes:
        is_own: the model computes its loss itself.
        computed_by_keras: Keras was asked for the loss.
    """

    def __init__(self, shares: Shares, training: bool) -> None:
        kind = type(shares.model)
        name = "train_step" if training else "test_step"
        own_loss = kind.compute_loss is not keras.Model.compute_loss
        self.is_own = own_loss or getattr(kind, name) is not getattr(keras.Model, name)
        self.computed_by_keras = self._one_number = self._nested = self._alone = False
        self._counts_rows, self._training = True, training
        self._own_loss, self._shares, self._collectives = own_loss, shares, shares.collectives
        self._samples = tf.cast(current_samples(), tf.float64)
        # Of a batch that every rank computes one rank's samples count, see `Share`.
        self._counts = tf.cast(self._samples > 0, tf.float64)
        self._of_all: tuple[Any, tf.Tensor] | None = None

    def adds_gradients(self) -> bool:
        """Local: what the script's own step computes is a sum over rows, and so are its gradients."""
        own = self.is_own and (self._own_loss or not self.computed_by_keras)
        return own and self._shares.loss_is == "sum"

    def loss(self, call: Reduce, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Collective where the loss is no mean over rows: as `keras.Loss.__call__`."""
        if self._nested or any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(y_pred)):
            return self._left_alone(call, loss, y_true, y_pred, sample_weight)
        of_keras = _of_keras(loss)
        whole = self._shares.loss_is == "whole" or (self._shares.loss_is == "sum" and of_keras)
        if not (whole and getattr(loss, "fn", None) is keras.losses.circle):  # it compares each row with all others
            self._one_number, self._counts_rows = False, of_keras or not whole
            self._nested = True
            try:
                found = call(loss, y_true, y_pred, sample_weight)
            finally:
                self._nested = False
            if not (whole and self._one_number):
                if self._training and not (of_keras or self._one_number):
                    self._shares.row_losses.look(loss, y_true, y_pred)
                return self._beside_unreduced(found)
        arguments, own = self._rows_of_all(loss.dtype, y_true, y_pred, sample_weight)
        found = self._left_alone(call, loss, *arguments)
        if not len(found.shape):
            return self._beside_unreduced(found)
        rows, total = tf.stop_gradient(tf.gather(found, own)), tf.reduce_sum(found)  # the gradient is that of the sum
        return rows + tf.math.divide_no_nan(total - tf.stop_gradient(total), tf.cast(tf.size(rows), total.dtype))

    def _left_alone(self, call: Reduce, *arguments: Any) -> Any:
        """Local: a loss that another one is made of, or one of the rows of all ranks."""
        before, self._nested, self._alone = (self._nested, self._alone), True, True
        try:
            return call(*arguments)
        finally:
            self._nested, self._alone = before

    def term(self, value: Any, values: Any, sample_weight: Any, mask: Any, reduction: Any) -> Any:
        """Collective where it does not divide by rows: this rank's share of one term of the loss.

        The value is as Keras reduced it; the other arguments are those of `reduce_weighted_values`.
        """
        if not len(values.shape):
            self._one_number = True
            return value if self._alone or self._shares.loss_is != "sum" else self._times(value, self._ranks())
        if self._alone:
            return value
        if self._shares.served:
            if reduction in (*UNREDUCED, "sum") or _divisor(values, sample_weight, mask, reduction) is not None:
                self._shares.tell(OF_SERVERS)
            return value
        if reduction in UNREDUCED:  # its gradient is that of the sum; it is reported as a mean
            return self._with_gradients_of_sum(value)
        if reduction == "sum":
            return self._times(value, self._ranks())
        divisor = _divisor(values, sample_weight, mask, reduction)
        if divisor is None and not self._counts_rows:
            divisor = tf.size(values)
        if divisor is None and self.adds_gradients():
            divisor = self._samples
        return value if divisor is None else self._times(value, self._share(divisor))

    def _beside_unreduced(self, value: Any) -> Any:
        """Collective where it is so: Keras adds a number to each row of the loss of another output."""
        outputs = keras_private.losses_of_outputs(self._shares.model)
        unreduced = len(outputs) > 1 and any(output.reduction in UNREDUCED for output in outputs)
        return self._with_gradients_of_sum(value) if unreduced and not len(value.shape) else value

    def _with_gradients_of_sum(self, value: Any) -> Any:
        grown = self._times(value, self._ranks())
        return grown + tf.stop_gradient(value - grown)

    def added_loss(self, layer: Any, loss: Any) -> Any:
        """Collective where losses are sums: what a layer of the script's own gives to `add_loss`."""
        if self._shares.loss_is != "sum" or self.adds_gradients():
            self._shares.tell_of_assumption(f"what layer {layer.name} gives to add_loss")
            return loss
        return keras.tree.map_structure(lambda one: self._times(one, self._ranks()), loss)

    def activity_loss(self, loss: Any) -> Any:
        """Collective where Keras adds a sum over rows, as it did: what it adds for an activity regularizer."""
        if not keras_private.ACTIVITY_LOSS_IS_A_SUM:
            return loss
        if self._shares.served:
            self._shares.tell(OF_SERVERS)
            return loss
        return self._times(loss, self._ranks())

    def weight(self, metric: Any, values: Any, sample_weight: Any) -> Any:
        """Collective where it needs the samples of all ranks: the weight of what a metric is given.

        Keras counts each batch once in the loss of one output, and in a metric whose function returns one number; and
        a script, in a number that it gives to a `Mean` or `Sum`. So each rank counts as the part of the batch it has.
        """
        if sample_weight is not None or len(getattr(values, "shape", ())) or current_share() is not None:
            return sample_weight
        if metric in keras_private.trackers_of_outputs(self._shares.model) or isinstance(
            metric, keras.metrics.MeanMetricWrapper
        ):
            counts = self._shares.loss_is == "whole"
        else:
            counts = self._training and not self._shares.served
        return tf.math.divide_no_nan(self._samples, self._total()) if counts else None

    def of_whole_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Local: what a metric computes by; collective when called, where a number comes out: that of all rows then."""
        if self._shares.loss_is != "whole" or isinstance(function, keras.losses.Loss):  # which is divided by `loss`
            return function

        def call(y_true: Any, y_pred: Any, **arguments: Any) -> Any:
            found = function(y_true, y_pred, **arguments)
            if isinstance(found, keras.KerasTensor) or len(keras.ops.shape(found)):
                return found
            return function(*self._rows_of_all(None, y_true, y_pred)[0], **arguments)

        return call

    def moments(self, layer: Any, inputs: Any, mask: Any) -> Any:
        """Collective: mean and variance over the rows of all ranks; None where this layer takes its own."""
        if not (self._shares.sync_batch_norm or layer.synchronized):
            return None
        if self._shares.served:
            self._shares.tell(MOMENTS_OF_SERVERS)
            return None
        return moments(inputs, mask, keras_private.normalized_axes(layer), self._collectives, gradient_weight())

    def _share(self, divisor: Any) -> tf.Tensor:
        """Collective: the factor that makes the weighted mean of terms divided by `divisor` one divided by all."""
        own = tf.cast(divisor, tf.float64) * self._counts
        total = self._collectives.total(tf.stack([own, self._samples]))
        if self.adds_gradients():
            return tf.math.divide_no_nan(own, total[0])
        return tf.math.divide_no_nan(own * total[1], total[0] * self._samples)

    def _ranks(self) -> tf.Tensor:
        """Collective, once in a step: the factor that makes the weighted mean over ranks a sum."""
        if self.adds_gradients():
            return tf.ones((), tf.float64)
        return tf.math.divide_no_nan(self._total(), self._samples)

    def _total(self) -> tf.Tensor:
        """Collective, once in a step: the samples of all ranks."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        # A tensor of a branch cannot be used outside of it.
        if self._of_all is None or self._of_all[0] is not graph:
            self._of_all = graph, self._collectives.total(self._samples)
        return self._of_all[1]

    def _times(self, value: Any, factor: tf.Tensor) -> Any:
        return value * tf.cast(factor, value.dtype)

    def _rows_of_all(self, dtype: str | None, *given: Any) -> tuple[list[Any], tf.Tensor]:
        """Collective: labels, outputs and weights of all ranks, as tensors with their masks; and where its own are."""
        leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
        tensors = [keras.ops.convert_to_tensor(leaf, dtype=dtype) for leaf in leaves]
        masks = [tf.cast(mask, tf.bool) for mask in map(keras_private.get_keras_mask, leaves) if mask is not None]
        kept = tf.shape(tensors[0])[0] * tf.cast(self._counts, tf.int32)
        found, own = self._collectives.rows([tensor[:kept] for tensor in (*tensors, *masks)], self._ranks)
        of_masks = iter(found[len(leaves) :])
        for leaf, whole in zip(leaves, found, strict=False):
            if keras_private.get_keras_mask(leaf) is not None:
                keras_private.set_keras_mask(whole, next(of_masks))
        of_all = iter(found)
        return keras.tree.map_structure(lambda leaf: None if leaf is None else next(of_all), [*given]), own


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: str) -> Any:
    """Local: what Keras divides a sum over `values` by; None for what grows with the number of rows.

    The arguments are those of `reduce_weighted_values`.
    """
    if reduction == "mean_with_sample_weight":
        weight = keras_private.weight_with_mask(values, sample_weight, mask, reduction)
        return None if weight is None else tf.reduce_sum(weight)
    if mask is not None:
        valid = tf.reduce_sum(tf.cast(mask, tf.float64))
        ratio = tf.size(values, tf.int64) / tf.maximum(tf.size(mask, tf.int64), 1)
        return valid * tf.cast(ratio, tf.float64)
    return None


def _of_keras(thing: Any) -> bool:
    """Local: whether a loss is one that comes with Keras."""
    owner = getattr(thing, "fn", None) or type(thing)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "keras"


def _update_by_function(original: Reduce, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Local: as `MeanMetricWrapper.update_state`; collective where its function gives a number of a whole batch."""
    step = _current.get()
    if step is None:
        return original(metric, *args, **kwargs)
    with keras_private.computing_by(metric, step.of_whole_batch(keras_private.function_of(metric))):
        return original(metric, *args, **kwargs)


@functools.cache
def _install() -> None:
    """Local: let a step that is under way take part in what Keras computes; without one nothing is changed."""

    def call(original: Reduce, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = _current.get()
        if step is None:
            return original(loss, y_true, y_pred, sample_weight)
        return step.loss(original, loss, y_true, y_pred, sample_weight)

    def reduce(
        original: Reduce,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        step, value = _current.get(), original(values, sample_weight, mask, reduction, dtype)
        return value if step is None else step.term(value, values, sample_weight, mask, reduction)

    def compute_loss(original: Reduce, model: Any, *args: Any, **kwargs: Any) -> Any:
        step = _current.get()
        if step is not None:
            step.computed_by_keras = True
        return original(model, *args, **kwargs)

    def add_loss(original: Reduce, layer: Any, loss: Any) -> None:
        step = _current.get()
        if step is not None:
            by_keras = sys._getframe(2).f_globals.get("__name__", "").startswith("keras.")
            loss = step.activity_loss(loss) if by_keras else step.added_loss(layer, loss)
        original(layer, loss)

    def of_moments(original: Reduce, layer: Any, inputs: Any, mask: Any) -> Any:
        step, kept, found = _current.get(), _kept.get(), None
        if step is not None and not isinstance(inputs, keras.KerasTensor):
            found = step.moments(layer, inputs, mask)
        elif step is None and kept is not None and not isinstance(inputs, keras.KerasTensor):
            found = moments(inputs, mask, keras_private.normalized_axes(layer), kept, gradient_weight())
        return original(layer, inputs, mask) if found is None else found

    def update_state(original: Reduce, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        step = _current.get()
        return original(metric, values, sample_weight if step is None else step.weight(metric, values, sample_weight))

    patch(keras.losses.Loss, "__call__", call)
    patch(keras.metrics.Mean, "update_state", update_state)
    patch(keras.metrics.Sum, "update_state", update_state)
    patch(keras.metrics.MeanMetricWrapper, "update_state", _update_by_function)
    patch(keras_private.loss, keras_private.REDUCTION, reduce)
    patch(keras.Model, "compute_loss", compute_loss)
    patch(keras.layers.Layer, "add_loss", add_loss)
    patch(keras.layers.BatchNormalization, keras_private.MOMENTS, of_moments)
