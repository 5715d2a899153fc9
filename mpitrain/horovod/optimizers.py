"""Distributed optimizers with Horovod's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mpitrain.errors import UsageError
from mpitrain.horovod.basics import Adasum, Average, Sum, operation
from mpitrain.horovod.compression import Compression
from mpitrain.horovod.gradients import GradientExchange, LocalVariables, Options, exchange_for, scaled
from mpitrain.horovod.legacy import LegacyOptimizer
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.training import optimizer as distributed

ATTRIBUTE = "_mpitrain_scaled"


def check_groups(num_groups: int, groups: Any) -> None:
    """Local: groups of gradients change no number, and buckets are formed without them.

    Raises:
        ValueError: they are neither a number nor lists of variables.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
    if groups is not None and not isinstance(groups, list) and not groups > 0:
        raise ValueError("groups must be a number above 0 or a list of lists of variables")


def distribute(
    optimizer: Any,
    options: Options,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    local_layers: Any = None,
) -> Any:
    """Local: make a Keras optimizer average (or sum) its gradients over all ranks of a process set.

    Args:
        optimizer: is changed and returned; if it was given here before, the options are new.
        options: how the gradients become one.
        backward_passes_per_step: gradients of so many steps are added up first.
        average_aggregated_gradients: they are averaged.
        local_layers: layers whose gradients stay each rank's own; if it is given at all, even empty, ranks keep
            the values that their variables start from.

    Raises:
        ValueError: another reduction.
        UsageError: it is no Keras 3 optimizer, was used before it was to accumulate gradients, or is one of other
            ranks already.
    """
    if operation(options.op, None) not in (Average, Sum):
        raise ValueError("op must be Average or Sum for the gradients of a Keras optimizer")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__name__}; "
            "optimizers of tf.keras.optimizers.legacy are gone with Keras 3"
        )
    _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    hook = distributed.hook_of(optimizer)
    exchange = exchange_for(options) if hook is None else _with_options(hook.exchange, options)
    kept = LocalVariables() if exchange is None else exchange.local
    kept.add_layers(local_layers)
    if exchange is not None:
        same_start = local_layers is None and options.process_set.process_set_id == 0
        distributed.DistributedOptimizer(optimizer, exchange=exchange, synchronize_first=same_start)
    # `object.__setattr__`: Keras tracks what is assigned to an optimizer.
    object.__setattr__(optimizer, "register_local_var", kept.add)
    return optimizer


def _with_options(exchange: Any, options: Options) -> GradientExchange:
    """Local: the exchange of an optimizer that is distributed already, from now on as `options` say."""
    if not isinstance(exchange, GradientExchange) or exchange.options.process_set is not options.process_set:
        raise UsageError(
            "DistributedOptimizer was given an optimizer that is distributed already, among the ranks of another "
            "process set: make a new optimizer for each"
        )
    exchange.options = options
    return exchange


def _accumulate(optimizer: Any, steps: int, average: bool) -> None:
    """Local: Keras averages what it accumulates; Horovod adds it up unless told otherwise."""
    if steps <= 1:
        return
    if optimizer.built:
        raise UsageError("backward_passes_per_step must be given before the optimizer is first used")
    # Keras makes its accumulators when the optimizer is built, which it must therefore not be yet.
    optimizer.gradient_accumulation_steps = steps
    if average or ATTRIBUTE in optimizer.__dict__:
        return
    apply: Callable[..., Any] = optimizer.apply

    def multiplied(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return apply([scaled(gradient, float(steps)) for gradient in grads], trainable_variables)

    object.__setattr__(optimizer, ATTRIBUTE, True)
    object.__setattr__(optimizer, "apply", multiplied)


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
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: as in `horovod.tensorflow`: a Keras optimizer itself is changed; one of TensorFlow 1 is wrapped."""
    check_groups(num_groups, groups)
    options = Options(op, compression, sparse_as_dense, gradient_predivide_factor, scale_local_gradients, process_set)
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not go with average_aggregated_gradients=True")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return LegacyOptimizer(
            optimizer, options, name, use_locking, backward_passes_per_step, average_aggregated_gradients
        )
    return distribute(optimizer, options, backward_passes_per_step, average_aggregated_gradients)


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
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: as in `horovod.tensorflow.keras`; the optimizer itself is changed and returned."""
    check_groups(num_groups, groups)
    options = Options(op, compression, sparse_as_dense, gradient_predivide_factor, scale_local_gradients, process_set)
    return distribute(optimizer, options, backward_passes_per_step, average_aggregated_gradients)


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's)
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
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: as `DistributedOptimizer`; the gradients of `local_layers` stay each rank's own.

    Ranks start from the values they have: what is to be the same on all is broadcast by the script, as under Horovod.
    """
    check_groups(0, groups)
    options = Options(op, compression, sparse_as_dense, gradient_predivide_factor, scale_local_gradients, process_set)
    layers = () if local_layers is None else local_layers
    return distribute(optimizer, options, backward_passes_per_step, average_aggregated_gradients, layers)
