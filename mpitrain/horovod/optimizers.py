"""Distributed optimizers and tapes with Horovod's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.horovod.basics import Average, Sum, check_process_set, global_process_set, operation, size, world
from mpitrain.horovod.operations import Compression
from mpitrain.training import optimizer as distributed
from mpitrain.training import tape as tapes

ATTRIBUTE = "_mpitrain_scaled"


def dense(gradients: Sequence[Any], sparse_as_dense: bool, factor: float) -> list[Any]:
    """Local: gradients times `factor`, sparse ones made dense where that is asked for."""

    def one(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            if not sparse_as_dense:
                values = gradient.values * tf.cast(factor, gradient.values.dtype)
                return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            gradient = tf.convert_to_tensor(gradient)
        return gradient if gradient is None or factor == 1.0 else gradient * tf.cast(factor, gradient.dtype)

    return [one(gradient) for gradient in gradients]


def _of_gradients(op: int, process_set: Any) -> int:
    """Local: Average or Sum.

    Raises:
        UsageError: another reduction, or a process set.
    """
    check_process_set(process_set)
    if operation(op, None) not in (Average, Sum):
        raise UsageError("op must be Average or Sum for gradients")
    return op


def distribute(
    optimizer: Any,
    *,
    op: int,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    sparse_as_dense: bool,
    process_set: Any,
) -> Any:
    """Local: make a Keras optimizer average (or sum) its gradients over all ranks.

    Raises:
        UsageError: it is no Keras 3 optimizer, or was used before it was to accumulate gradients.
    """
    op = _of_gradients(op, process_set)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__name__}; "
            "optimizers of tf.compat.v1 and tf.keras.optimizers.legacy are gone with Keras 3"
        )
    factor = float(size()) if op == Sum else 1.0
    if backward_passes_per_step > 1:
        if optimizer.built:
            raise UsageError("backward_passes_per_step must be given before the optimizer is first used")
        optimizer.gradient_accumulation_steps = backward_passes_per_step
        factor *= 1.0 if average_aggregated_gradients else backward_passes_per_step
    distributed.DistributedOptimizer(optimizer, world=world())
    if (factor != 1.0 or sparse_as_dense) and ATTRIBUTE not in optimizer.__dict__:
        apply: Callable[..., Any] = optimizer.apply

        def scaled(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            return apply(dense(grads, sparse_as_dense, factor), trainable_variables)

        object.__setattr__(optimizer, ATTRIBUTE, True)
        object.__setattr__(optimizer, "apply", scaled)
    return optimizer


def DistributedOptimizer(  # noqa: N802 (Horovod's)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: as in `horovod.tensorflow`; the optimizer itself is changed and returned."""
    return distribute(
        optimizer,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )


def KerasDistributedOptimizer(  # noqa: N802 (Horovod's)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: as in `horovod.tensorflow.keras`; the optimizer itself is changed and returned."""
    return distribute(
        optimizer,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )


class _Tape(tapes.DistributedGradientTape):
    def __init__(self, tape: Any, op: int, sparse_as_dense: bool) -> None:
        super().__init__(tape, world=world())
        self._factor = float(size()) if op == Sum else 1.0
        self._dense = sparse_as_dense

    def gradient(  # type: ignore[override]
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> Any:
        """Collective: gradients of `target`, averaged or summed over all ranks."""
        means = super().gradient(target, sources, output_gradients)
        parts = dense(tf.nest.flatten(means), self._dense, self._factor)
        return tf.nest.pack_sequence_as(sources, parts)


def DistributedGradientTape(  # noqa: N802 (Horovod's)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: a tape whose gradients are the mean or sum over all ranks."""
    return _Tape(gradtape, _of_gradients(op, process_set), sparse_as_dense)
