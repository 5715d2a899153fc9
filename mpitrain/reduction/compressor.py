"""The contract of what makes gradients smaller on their way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from mpitrain.collectives.engine import Averaging
from mpitrain.reduction.buckets import TensorSpec

Tensors: TypeAlias = Sequence[tf.Tensor]
State: TypeAlias = Any


class Compressor(Protocol):
    """Takes the mean of one bucket's gradients over the ranks, exactly or nearly, with less that travels.

    Two pure functions: what is to be remembered, for each bucket, stands in their arguments and results. To add a
    compressor, write a class with these methods in a file of its own and name it in `COMPRESSORS`;
    `tests/contracts/compressor.py` then runs with it. Trainings use none but `none` so far. For another there are
    missing: an option in `strategies/options.py`; the compressor's name in `UpdateCall`, so that ranks agree on it; in
    `AllReduce.update` its name for `mean_gradients`, and variables in `update.state` for what it remembers, which
    `checkpoint/state.py` does not save yet; and in `AllReduce._add_nothing` its part of a rank without data.

    `exchange` is traced into a graph. It takes the bucket in one of two ways, the same on all ranks: by
    `averaging.mean`, or by `averaging.share` and collectives of `averaging.engine` (a sum of factors, a gathering of
    codes) that give the sum over ranks of share times what each has sent. It must hold on a rank without data, whose
    gradients are zeros and whose share is 0. Where gradients are infinite their mean must not look finite, and those of
    later updates must be.

    `mean = sum of share * sent` is all that is asked. So error feedback is a compressor around any other: it gives it
    `x + residual`, and then remembers `residual = x + residual - sent`. (With the mean in place of `sent` it diverges.)
    """

    def init(self, specs: Sequence[TensorSpec]) -> State:
        """Local: what is remembered before the first update, for gradients of these shapes and dtypes.

        Returns:
            Tensors in lists, tuples or dictionaries, equal on all ranks; their shapes and dtypes stay. () for nothing.
        """
        ...

    def exchange(self, x: Tensors, state: State, averaging: Averaging) -> tuple[Tensors, Tensors, State]:
        """Collective: one bucket of dense gradients.

        Args:
            x: this rank's; not to be changed.
            state: of `init`, or of the update before.
            averaging: takes this bucket next.

        Returns:
            mean: like `x`, the same bits on all ranks.
            sent: like `x`, what this rank has contributed in place of it; zeros where its share is 0.
            state: for the next update.
        """
        ...


class NoCompression(Compressor):
    """Gradients travel as they are, and nothing is remembered."""

    def init(self, specs: Sequence[TensorSpec]) -> State:
        return ()

    def exchange(self, x: Tensors, state: State, averaging: Averaging) -> tuple[Tensors, Tensors, State]:
        return averaging.mean(x), x, state


COMPRESSORS: dict[str, Compressor] = {"none": NoCompression()}  # by name
