"""Losses that are no mean over rows: in each step they become this rank's share of the loss of all ranks' rows.

What a rank computes is weighted by its samples, when gradients are averaged and when Keras reports losses. So a mean
over rows is exact without anything more. A term with another denominator (steps that are not masked, the sum of sample
weights, none at all) is multiplied by what makes its weighted mean over ranks the term of the whole batch, for which
ranks add up their denominators. A loss of which only the whole batch makes sense gets the rows of all ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from mpitrain.runtime import keras_private
from mpitrain.strategies.strategy import Strategy
from mpitrain.strategies.weighting import added_up, current_samples, gradient_weight
from mpitrain.training.batch_moments import moments
from mpitrain.training.counting import current_share, is_count
from mpitrain.training.gradient_use import GradientUses, watching
from mpitrain.training.loss_patches import install, stepping
from mpitrain.training.loss_terms import (
    MOMENTS_OF_SERVERS,
    OF_SERVERS,
    UNREDUCED,
    added_to_the_loss,
    divisor,
    of_keras,
    one_number_of_a_sum,
    taken_for_a_mean,
)
from mpitrain.training.row_losses import RowLosses
from mpitrain.training.step_collectives import StepCollectives

LossIs = Literal["mean", "sum", "whole"]
Reduce = Callable[..., Any]


class Shares:
    """How the losses of one model are divided among the ranks.

    Args:
        active: whether all ranks run a step; asked at each run.
    """

    def __init__(self, model: Any, strategy: Strategy, active: Callable[[], bool]) -> None:
        install()
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
        # A function: whether Keras is asked for the loss is known only when gradients are exchanged.
        with stepping(step), added_up(step.adds_gradients), watching(step.uses):
            yield
        if training and step.is_own:
            self._tell_of_own_step(step)

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

    def _tell_of_own_step(self, step: Step) -> None:
        name = self.model.name
        if step.uses is not None:
            step.uses.check([])
        if not step.computed_by_keras or step.own_loss:
            self.tell_of_assumption(f"the loss of {name}, which computes it itself,")
        elif step.uses is not None and step.uses.adds_to_losses and self.loss_is == "whole":
            self.tell(added_to_the_loss(name))

    def tell_of_assumption(self, what: str) -> None:
        """Local: where the whole batch was asked for: what nobody can know."""
        if self.loss_is == "whole":
            self.tell(taken_for_a_mean(what))

    def tell(self, text: str) -> None:
        """Local: once, on rank 0."""
        if self._strategy.world.is_root and text not in self._told:
            sys.stderr.write(f"mpitrain: {text}\n")
        self._told.add(text)


class Step:
    """One step that is run, or traced, on this rank.

    Attributes:
        is_own: the model computes its loss itself.
        own_loss: in a method `compute_loss`.
        computed_by_keras: Keras was asked for the loss.
        uses: what becomes of gradients; None where Keras' own step takes them.
    """

    def __init__(self, shares: Shares, training: bool) -> None:
        kind = type(shares.model)
        name = "train_step" if training else "test_step"
        own_loss = kind.compute_loss is not keras.Model.compute_loss
        self.is_own = own_loss or getattr(kind, name) is not getattr(keras.Model, name)
        self.computed_by_keras = self._one_number = self._nested = self._alone = self._known = False
        self._counts_rows, self._training = True, training
        self.own_loss, self._shares, self._collectives = own_loss, shares, shares.collectives
        owner = f"the train_step of {shares.model.name}"
        self.uses = GradientUses(owner, shares.tell) if training and self.is_own else None
        self._samples = tf.cast(current_samples(), tf.float64)
        # Of a batch that every rank computes one rank's samples count, see `Share`.
        self._counts = tf.cast(self._samples > 0, tf.float64)
        # what layers have added to the losses, by its identity: (loss, name of the layer, whether Keras did it)
        self._added: dict[int, tuple[Any, str, bool]] = {}
        self._of_all: tuple[Any, tf.Tensor] | None = None

    def adds_gradients(self) -> bool:
        """Local: what the script's own step computes is a sum over rows, and so are its gradients."""
        own = self.is_own and (self.own_loss or not self.computed_by_keras)
        return own and self._shares.loss_is == "sum"

    def loss(self, call: Reduce, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Collective where the loss is no mean over rows: as `keras.Loss.__call__`."""
        if self._nested or _is_symbolic(y_pred):
            return self._left_alone(call, loss, y_true, y_pred, sample_weight)
        self._known = True
        by_keras = of_keras(loss)
        whole = self._shares.loss_is == "whole" or (self._shares.loss_is == "sum" and by_keras)
        if not (whole and getattr(loss, "fn", None) is keras.losses.circle):  # it compares each row with all others
            self._one_number, self._counts_rows = False, by_keras or not whole
            self._nested = True
            try:
                found = call(loss, y_true, y_pred, sample_weight)
            finally:
                self._nested = False
            if not (whole and self._one_number):
                if self._training and not (by_keras or self._one_number):
                    self._shares.row_losses.look(loss, y_true, y_pred)
                return self._beside_unreduced(found)
        return self._of_whole_batch(call, loss, loss.dtype, y_true, y_pred, sample_weight)

    def overridden(self, call: Reduce, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Collective where it is no mean: a loss whose class has a `__call__` of the script's own, which may be any."""
        if self._nested or _is_symbolic(y_pred):
            return self._left_alone(call, loss, y_true, y_pred, sample_weight)
        if self._shares.loss_is == "whole":
            return self._of_whole_batch(call, loss, None, y_true, y_pred, sample_weight)
        self._known = False
        found = call(loss, y_true, y_pred, sample_weight)
        if self._known or self._shares.loss_is != "sum":
            return found
        self._known = True
        return self._times(found, self._ranks())

    def _of_whole_batch(self, call: Reduce, loss: Any, dtype: str | None, *given: Any) -> Any:
        """Collective: a loss of the rows of all ranks."""
        arguments, own = self._rows_of_all(dtype, *given)
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
            if reduction in (*UNREDUCED, "sum") or divisor(values, sample_weight, mask, reduction) is not None:
                self._shares.tell(OF_SERVERS)
            return value
        if reduction in UNREDUCED:  # its gradient is that of the sum; it is reported as a mean
            return self._with_gradients_of_sum(value)
        if reduction == "sum":
            return self._times(value, self._ranks())
        divides_by = divisor(values, sample_weight, mask, reduction)
        if divides_by is None and not self._counts_rows:
            divides_by = tf.size(values)
        if divides_by is None and self.adds_gradients():
            divides_by = self._samples
        return value if divides_by is None else self._times(value, self._share(divides_by))

    def _beside_unreduced(self, value: Any) -> Any:
        """Collective where it is so: Keras adds a number to each row of the loss of another output."""
        outputs = keras_private.losses_of_outputs(self._shares.model)
        unreduced = len(outputs) > 1 and any(output.reduction in UNREDUCED for output in outputs)
        return self._with_gradients_of_sum(value) if unreduced and not len(value.shape) else value

    def _with_gradients_of_sum(self, value: Any) -> Any:
        grown = self._times(value, self._ranks())
        return grown + tf.stop_gradient(value - grown)

    def note_added(self, layer: Any, loss: Any, by_keras: bool) -> None:
        """Local: what is given to `add_loss`: by Keras for an activity regularizer, or by the script's own layer."""
        self._added |= {id(one): (one, layer.name, by_keras) for one in keras.tree.flatten(loss)}

    def added_losses(self, losses: list[Any]) -> list[Any]:
        """Collective where they are no means over rows: this rank's share of what layers have added in their calls.

        Only where the losses are asked for it is known whether that is Keras, which averages, or the script's own step.
        """
        return [self._added_loss(*self._added[id(one)]) if id(one) in self._added else one for one in losses]

    def _added_loss(self, loss: Any, layer: str, by_keras: bool) -> Any:
        is_mean = by_keras and not keras_private.ACTIVITY_LOSS_IS_A_SUM
        if self.adds_gradients():
            return self._times(loss, self._share_of_rows()) if is_mean else loss
        if not by_keras and self._shares.loss_is != "sum":
            self._shares.tell_of_assumption(f"what layer {layer} gives to add_loss")
            return loss
        if by_keras and not is_mean and self._shares.served:
            self._shares.tell(OF_SERVERS)
            return loss
        return loss if is_mean else self._times(loss, self._ranks())

    def regularization(self, losses: list[Any]) -> list[Any]:
        """Collective where gradients are added up: this rank's share of the losses of weights, which all ranks have."""
        if not (losses and self.adds_gradients()):
            return losses
        return [self._times(one, self._share_of_rows()) for one in losses]

    def weight(self, metric: Any, values: Any, sample_weight: Any) -> Any:
        """Collective where it needs the samples of all ranks: the weight of what a metric is given.

        Keras counts each batch once in the loss of one output, and in a metric whose function returns one number; and
        a script, in a number that it gives to a `Mean` or `Sum`. So each rank counts as the part of the batch it has.
        """
        shape = values.shape if hasattr(values, "shape") else tf.convert_to_tensor(values).shape
        if sample_weight is not None or len(shape) or is_count(metric, values):
            return sample_weight
        if self._training and isinstance(metric, keras.metrics.Sum):
            self._shares.tell(one_number_of_a_sum(metric.name))
        if current_share() is not None:
            return None
        if metric in keras_private.trackers_of_outputs(self._shares.model) or isinstance(
            metric, keras.metrics.MeanMetricWrapper
        ):
            counts = self._shares.loss_is == "whole"
        else:
            counts = self._training and not self._shares.served
        return self._share_of_rows() if counts else None

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

    def _share(self, divides_by: Any) -> tf.Tensor:
        """Collective: the factor that makes the weighted mean of terms divided by that one divided by all."""
        own = tf.cast(divides_by, tf.float64) * self._counts
        total = self._collectives.total(tf.stack([own, self._samples]))
        if self.adds_gradients():
            return tf.math.divide_no_nan(own, total[0])
        return tf.math.divide_no_nan(own * total[1], total[0] * self._samples)

    def _share_of_rows(self) -> tf.Tensor:
        """Collective, once in a step: what this rank has of the rows of all ranks."""
        return tf.math.divide_no_nan(self._samples, self._total())

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


def _is_symbolic(outputs: Any) -> bool:
    return any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(outputs))
