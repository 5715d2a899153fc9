"""How gradients of the ranks of a process set become one, with Horovod's options."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from mpitrain.horovod.basics import Average, Sum
from mpitrain.horovod.compression import Compression
from mpitrain.horovod.operations import allreduce
from mpitrain.horovod.process_sets import ProcessSet, global_process_set, table
from mpitrain.runtime import keras_private
from mpitrain.strategies.joining import Part
from mpitrain.strategies.strategy import Exchange, Update, strategy_of
from mpitrain.world.world import World


def scaled(gradient: Any, factor: float) -> Any:
    """Local: a gradient, which may be None or `IndexedSlices`, times `factor`."""
    if gradient is None or factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


@dataclass(frozen=True)
class Options:
    """What optimizers and tapes are asked for."""

    op: int = Average  # the reduction
    compression: Any = Compression.none  # how dense gradients travel
    sparse_as_dense: bool = False  # make `IndexedSlices` dense first
    predivide: float = 1.0  # gradients are divided by it before the sum, and multiplied after it
    scale_local: bool = True  # gradients of local variables are divided by the number of ranks
    process_set: ProcessSet = field(default=global_process_set)  # whose gradients

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor is for op=Average only")


class LocalVariables:
    """Variables that are each rank's own, with their gradients."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._layers: list[Any] = []
        self.traced = False  # a graph was made that holds what was known of them then

    def add(self, *variables: Any) -> None:
        """Local: these too."""
        if self.traced and variables:
            warnings.warn(
                "a variable was registered as local after a step was traced, which goes on exchanging its gradient: "
                "register it before the first step",
                stacklevel=3,
            )
        self._variables.extend(variables)

    def add_layers(self, layers: Any) -> None:
        """Local: what a layer, or several, have for variables whenever it is asked; they need not be built yet.

        Raises:
            ValueError: something is no layer.
        """
        found = [layers] if isinstance(layers, keras.layers.Layer) else list(layers or ())
        if not all(isinstance(layer, keras.layers.Layer) for layer in found):
            raise ValueError("local_layers must be Keras layers")
        self._layers.extend(found)

    def __iter__(self) -> Iterator[Any]:
        yield from self._variables
        for layer in self._layers:
            yield from layer.weights

    def __contains__(self, variable: Any) -> bool:
        own = _bare(variable)
        return any(_bare(local) is own for local in self)


def _bare(variable: Any) -> Any:
    """Local: of a Keras variable that has a value the one of TensorFlow: gradients may be asked for by either."""
    value = keras_private.bare(variable)
    return variable if value is None else value


class GradientExchange(Exchange):
    """What changes gradients, as the options of one optimizer or tape say, on their way to the strategy of a World."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.options = world, options
        self.local = LocalVariables()

    def is_shared(self, variable: Any) -> bool:
        """Local: whether this variable is not one of this rank alone."""
        return variable not in self.local

    def update(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> Any:
        """Collective: the gradients of all ranks, reduced as the options say; those of local variables stay."""
        return update.apply(self.reduced(gradients, variables, update), variables)

    def expect(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> None:
        """Local: as they will travel."""
        shared = self._shared(variables)
        sent, _ = self._outgoing([gradients[index] for index in shared])
        strategy_of(self.world).expect(
            sent, [variables[index] for index in shared], self._travelling(gradients, variables, update)
        )

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> list[Any]:
        """Collective: what `update` applies."""
        size, options = self.world.size, self.options
        if size == 1:
            return list(gradients)
        self.local.traced = self.local.traced or not tf.executing_eagerly()
        result = [scaled(g, 1.0 / size) if options.scale_local else g for g in gradients]
        shared = self._shared(variables)
        own = [gradients[index] for index in shared]
        if options.op in (Average, Sum) and tf.compat.v1.executing_eagerly_outside_functions():
            update = self._travelling(gradients, variables, update)
            received = self._in_buckets(own, [variables[index] for index in shared], update)
        else:  # a graph of TensorFlow 1, or another reduction
            received = [None if gradient is None else self._alone(gradient) for gradient in own]
        for index, gradient in zip(shared, received, strict=True):
            result[index] = gradient
        return result

    def _shared(self, variables: Sequence[Any]) -> list[int]:
        return [index for index, variable in enumerate(variables) if variable not in self.local]

    def _travelling(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> Update:
        """Local: the update as the strategy sees it, which hands back what `_outgoing` made."""
        synchronize, without_data = update.synchronize, update.without_data
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]

        def part(*_: Any) -> Part:
            assert without_data is not None
            return without_data([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

        return Update(
            update.title,
            synchronize=None if synchronize is None else lambda _: synchronize(variables),
            without_data=None if without_data is None else part,
            half=self.options.compression is not Compression.none,  # compressed gradients are summed as they travel
        )

    def _in_buckets(self, gradients: list[Any], variables: list[Any], update: Update) -> list[Any]:
        options = self.options
        sent, contexts = self._outgoing(gradients)
        # What comes back is a mean: times the number of ranks it is their sum.
        factor = options.predivide if options.op == Average else float(self.world.size)
        means = [scaled(gradient, factor) for gradient in strategy_of(self.world).update(sent, variables, update)]
        return [
            gradient if context is None else options.compression.decompress(gradient, *context)
            for gradient, context in zip(means, contexts, strict=True)
        ]

    def _alone(self, gradient: Any) -> Any:
        options = self.options
        gradient = self._dense(gradient)
        factor = 1.0 if isinstance(gradient, tf.IndexedSlices) else options.predivide
        return allreduce(
            gradient,
            op=options.op,
            compression=options.compression,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=options.process_set,
        )

    def _dense(self, gradient: Any) -> Any:
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if is_sparse and self.options.sparse_as_dense else gradient

    def _outgoing(self, gradients: Sequence[Any]) -> tuple[list[Any], list[tuple[Any] | None]]:
        """Local: gradients as they travel, and of those that were compressed what takes that back."""
        options = self.options
        sent: list[Any] = []
        contexts: list[tuple[Any] | None] = []
        for gradient in gradients:
            context = None
            small = self._dense(gradient)
            if small is not None and not isinstance(small, tf.IndexedSlices):
                small, what = options.compression.compress(small)
                context = (what,)
            sent.append(scaled(small, 1.0 / options.predivide))
            contexts.append(context)
        return sent, contexts


def exchange_for(options: Options) -> GradientExchange | None:
    """Local: what reduces the gradients of the process set; None where this rank is not in it, and keeps its own."""
    number = options.process_set.process_set_id
    world = None if number is None else table.member(number)
    return None if world is None else GradientExchange(world, options)
