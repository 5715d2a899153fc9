"""What ranks tell each other in the middle of a step: totals, and rows of tensors, with right gradients.

A graph is traced once, and may run later where only one rank runs it: then nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from mpitrain.collectives import host
from mpitrain.collectives.ordering import checked_call, in_turn
from mpitrain.comm.communicator import Buffer
from mpitrain.world.world import World


class StepCollectives:
    """Collectives of a step, eagerly and inside `tf.function`. A rank out of data takes part with nothing.

    `active` tells whether all ranks run the step; it is asked at each run.
    """

    def __init__(self, world: World, active: Callable[[], bool] = lambda: True) -> None:
        self._world, self._active = world, active

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Collective: the sum over ranks, through which no gradient flows."""
        how = host.Reduction("sum")

        def call(array: Buffer) -> list[Buffer]:
            return [host.all_reduce(self._world, array, how, host.IN_STEP) if self._active() else np.array(array)]

        return self._call(call, tensor, [(tensor.dtype, tensor.shape)])[0]

    def weighted_total(self, tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        """Collective, also on the way back: the sum over ranks.

        Args:
            tensor: of equal shape on all ranks.
            weight: a scalar float64; how much this rank's gradients count when the mean over ranks is taken. What
                flows back here is such that this mean is the gradient of the mean of the ranks' losses.
        """

        @tf.custom_gradient
        def total(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                factor = tf.cast(weight, upstream.dtype)
                return tf.math.divide_no_nan(self.total(upstream * factor), factor)

            return self.total(own), gradient

        found: tf.Tensor = total(tensor)
        return found

    def rows(self, tensors: list[tf.Tensor], factor: Callable[[], tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Collective: the rows of all ranks: the first ones of each, then the second ones, ...

        So do rows come back into the order of the batch that ranks r took rows r, r + N, ... of.

        Args:
            tensors: (n, ...) with the same n; n may differ between ranks.
            factor: on what flows back to this rank's own rows.

        Returns:
            The tensors, and (n,) the places of this rank's own rows in them.
        """
        count = tf.shape(tensors[0])[0]
        vector = (tf.int64, tf.TensorShape([None]))
        order, own = self._call(self._places, count, [vector, vector])

        @tf.custom_gradient
        def gathered(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                return tf.gather(upstream, own) * tf.cast(factor(), upstream.dtype)

            return tf.gather(self._rows(tensor), order), gradient

        found = []
        for tensor in tensors:
            # Ranks gather each tensor by itself: with other numbers of rows the orders would not belong together.
            with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(tensor)[0], count)]):
                found.append(gathered(tf.identity(tensor)))
        return found, own

    def _places(self, count: Buffer) -> list[Buffer]:
        """Collective: where the rows of all ranks, gathered rank by rank, belong; and where this rank's come to stand.

        Ranks and their number are those of now: some may have been lost since the graph was traced.
        """
        rank, size = self._world.rank, self._world.size
        numbers = self._gathered(np.arange(int(count), dtype=np.int64) * size + rank)
        order = np.argsort(numbers)
        return [order, np.flatnonzero(numbers[order] % size == rank)]

    def _gathered(self, array: Buffer) -> Buffer:
        return host.all_gather(self._world, array, host.IN_STEP) if self._active() else np.array(array)

    def _rows(self, tensor: tf.Tensor) -> tf.Tensor:
        shape = tf.TensorShape([None, *tensor.shape[1:]])
        return self._call(lambda array: [self._gathered(array)], tensor, [(tensor.dtype, shape)])[0]

    @tf.autograph.experimental.do_not_convert
    def _call(
        self,
        function: Callable[[Buffer], list[Buffer]],
        tensor: tf.Tensor,
        outputs: list[tuple[tf.DType, tf.TensorShape]],
    ) -> list[tf.Tensor]:
        def call(array: Any) -> list[Buffer]:
            return function(np.asarray(array))

        if tf.executing_eagerly():
            return [tf.convert_to_tensor(array) for array in call(tensor.numpy())]
        dtypes = [dtype for dtype, _ in outputs]
        found = in_turn(self._world.communicator, lambda: checked_call(call, [tensor], dtypes))
        for result, (_, shape) in zip(found, outputs, strict=True):
            result.set_shape(shape)
        return found
