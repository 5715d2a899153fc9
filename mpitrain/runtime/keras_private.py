"""The only door to what Keras keeps to itself: names under `keras.src`, and attributes that begin with an underscore.

Each says what it is for, and why no public name leads to it. A name that a new Keras has no more, or with another
shape, is found by `tests/unit/runtime/test_keras_private.py`; `tests/unit/test_private_names.py` keeps all other
modules out. This one loads Keras: it is for modules that do so anyway.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from mpitrain.errors import UsageError

try:
    from keras.src.backend.common import global_state, stateless_scope
    from keras.src.backend.common.masking import get_keras_mask as get_keras_mask  # masks travel on tensors
    from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
    from keras.src.losses import loss as loss  # `patch` its REDUCTION: losses have no method that reduces
    from keras.src.random.seed_generator import global_seed_generator
    from keras.src.saving.saving_lib import get_attr_skipset
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
    from keras.src.trainers.data_adapters.data_adapter_utils import (
        class_weight_to_sample_weights as class_weight_to_sample_weights,
    )
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter as GeneratorDataAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter
    from keras.src.utils import file_utils as file_utils  # `patch` its functions: where Keras' own modules find them
    from keras.src.utils import is_default as is_default  # whether a callback's method is the one that does nothing
except ImportError as error:
    raise UsageError(
        f"mpitrain does not know this Keras, {keras.__version__}: {error}. Install one that it was tested with: "
        'pip install "keras>=3.12,<3.16"'
    ) from error

# `tf.keras`, whose modules are copies of Keras' own, with the same functions in them.
PACKAGES = ("keras", "keras._tf_keras.keras")
# To `patch`, or set on one object.
REDUCTION = "reduce_weighted_values"  # (values, sample_weight, mask, reduction, dtype): of every loss, for its rows
MOMENTS = "_moments"  # (inputs, mask): mean and variance in a layer that normalizes batches
OWN_LOSSES = "_get_own_losses"  # (): what a layer has given to `add_loss`; `losses` mixes it with others
REGULARIZATION = "_get_regularization_losses"  # (): of the weights of a layer and the layers in it
CLIP_GRADIENTS = "_clip_gradients"  # (gradients): the first that happens to accumulated ones; clips where it should
LOGS_OF_EPOCH = "_get_metrics_result_or_logs"  # (logs): what the callbacks get of a whole epoch
SAVE_OF_BACKUP = "_save_model"  # of BackupAndRestore: its public methods decide when, and must run on all ranks
SAVE_OF_ORBAX = "_save_checkpoint"  # of OrbaxCheckpoint, likewise
# What Keras adds for an activity regularizer is a mean over the rows of a batch only from 3.14 on.
ACTIVITY_LOSS_IS_A_SUM = tuple(int(number) for number in keras.__version__.split(".")[:2]) < (3, 14)
# `train_on_batch` and `test_on_batch` give the numbers of one batch; before 3.15 those of all since the last reset.
FORGETS_BEFORE_BATCHES = "reset_metrics" in keras.Model.train_on_batch.__code__.co_names
# An argument of `evaluate` by which `fit` tells that it is the caller.
CALLED_BY_FIT = "_use_cached_eval_dataset"


def patch(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Local: calls of `owner.name` go to `function`, with the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, call)


# Data. Keras reads the script's data in its own order, and refuses what it does not take, in adapters only.

hold_out = array_slicing.train_validation_split  # what `validation_split` does
sliceable = array_slicing.convert_to_sliceable  # what an ArrayDataAdapter makes of its arrays before it takes rows
SparseRows = array_slicing.TensorflowSparseWrapper  # what that makes of sparse ones
take_sparse_rows = array_slicing.slice_tensorflow_sparse_wrapper


def arrays_of(adapter: ArrayDataAdapter) -> tuple[Any, int, Any]:
    """Local: the arrays, their number of rows, and `shuffle`: an adapter gives batches only."""
    return adapter._inputs, adapter._num_samples, adapter._shuffle


class PyDatasetPasses(PyDatasetAdapter):
    """Reads a `PyDataset`, and tells when a pass over it begins: with workers, which read ahead, or without."""

    def begin_pass(self) -> None:
        """Local: batches will be asked for in order, from the first."""

    def on_epoch_begin(self) -> None:
        """Local: workers begin."""
        if self.enqueuer is not None and not self.enqueuer.is_running():
            self.begin_pass()
        super().on_epoch_begin()

    def _get_iterator(self) -> Any:
        if self.enqueuer is None:
            self.begin_pass()
        return super()._get_iterator()


# Optimizers.


def step_counter(optimizer: Any) -> Any:
    """Local: the variable that counts calls of `apply`; `iterations` is none where gradients are accumulated."""
    return optimizer._iterations


def accumulated_gradients(optimizer: Any) -> list[Any]:
    """Local: the sums of gradients, which `variables` has among others; none where each step is an update."""
    return list(getattr(optimizer, "_accumulated_gradients", []))


def trained_variables(optimizer: Any) -> list[Any]:
    """Local: what the optimizer was built for; `variables` has its own state only."""
    return list(optimizer._trainable_variables)


def slots_of(optimizer: Any, chosen: Callable[[Any], bool]) -> list[Any]:
    """Local: what a built optimizer keeps of each of the chosen variables, such as their momentum.

    `variables` does not tell which belongs to which; in the optimizer's lists they stand in the same order.
    """
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


def learning_rate(optimizer: Any) -> Any:
    """Local: the variable or the schedule; `learning_rate` gives the present value of either."""
    return optimizer._learning_rate


def divide_learning_rate(optimizer: Any, divisor: Any) -> None:
    """Local: updates use the learning rate, be it a schedule's, over what `divisor` then is; it stays what it is."""
    current = optimizer._get_current_learning_rate
    # object.__setattr__: Keras tracks what is assigned to an optimizer; this is none of its state.
    object.__setattr__(optimizer, "_get_current_learning_rate", lambda: current() / divisor)


def decays(optimizer: Any, variable: Any) -> bool:
    """Local: whether weight decay acts on a variable; `exclude_from_weight_decay` can be told, not asked."""
    return bool(optimizer._use_weight_decay(variable))


# Models and layers.


def layers_within(model: Any) -> list[Any]:
    """Local: the layers, with those inside of layers, which `layers` has not; the model is the first."""
    return list(model._flatten_layers())


def output_layer(tensor: Any) -> Any:
    """Local: the layer of a functional model that a symbolic tensor comes from."""
    return tensor._keras_history.operation


def build_for(model: Any, batch: Any) -> None:
    """Local: build model, metrics and optimizer as the first step of a `fit` would; `build` wants shapes."""
    model._symbolic_build(data_batch=batch)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Local: where the `fit` that begins is to begin, if not at its argument: a callback's only way to say so."""
    model._initial_epoch = epoch


def losses_of_outputs(model: Any) -> list[Any]:
    """Local: those of a compiled and built model; `loss` is what `compile` was given."""
    compiled = model._compile_loss
    return [] if compiled is None else [output.loss for output in compiled._flat_losses or ()]


def trackers_of_outputs(model: Any) -> list[Any]:
    """Local: the metrics that hold the loss of each output: `metrics` has them among others."""
    return [*getattr(model._compile_loss, "metrics", ())]


def numbers_in_order(model: Any, logs: dict[str, Any]) -> Any:
    """Local: what `train_on_batch` makes of its logs when it is to return no dictionary."""
    return model._flatten_metrics_in_order(logs)


def normalized_axes(layer: Any) -> Sequence[int]:
    """Local: over which axes a built `BatchNormalization` takes its moments; `axis` is the one that stays."""
    axes: Sequence[int] = layer._reduction_axes
    return axes


class BatchNormalizationByMoments(keras.layers.BatchNormalization):
    """Batch normalization whose mean and variance a subclass can compute otherwise."""

    def moments(self, inputs: Any, mask: Any) -> Any:
        """Local: mean and variance of this batch."""
        return super()._moments(inputs, mask)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        return self.moments(inputs, mask)


def bare(variable: Any) -> Any:
    """Local: the variable of TensorFlow in one of Keras, which `value` reads; None before it has a value."""
    return getattr(variable, "_value", None)


# Losses and metrics.


def weight_with_mask(values: Any, sample_weight: Any, mask: Any, reduction: str) -> Any:
    """Local: what a loss multiplies `values` by, in their shape, before it reduces them; None for nothing."""
    weight = loss.apply_mask(sample_weight, mask, dtype=values.dtype, reduction=reduction)
    if weight is None:
        return None
    return loss.squeeze_or_expand_to_same_rank(values, keras.ops.cast(weight, values.dtype))[1]


def variables_of(metric: Any) -> list[Any]:
    """Local: its own variables; `variables` goes on with those of metrics inside."""
    return list(metric._variables)


def function_of(metric: Any) -> Callable[..., Any]:
    """Local: what a `MeanMetricWrapper` takes the mean of."""
    function: Callable[..., Any] = metric._fn
    return function


@contextlib.contextmanager
def computing_by(metric: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Local: meanwhile a `MeanMetricWrapper` takes the mean of another function, of which Keras need not know."""
    before = metric._fn
    object.__setattr__(metric, "_fn", function)
    try:
        yield
    finally:
        object.__setattr__(metric, "_fn", before)


# Callbacks, saving, random numbers.


def call_at_once(callbacks: Any) -> None:
    """Local: a `CallbackList` calls none of its callbacks on a thread, later, as it may where logs are tensors."""
    callbacks._async_train = callbacks._async_test = False


def in_stateless_scope() -> bool:
    """Local: whether variables have values of a `keras.StatelessScope` on this thread."""
    return bool(stateless_scope.in_stateless_scope())


def keep_reference_objects() -> None:
    """Local: what Keras compares objects with while it saves, for this thread.

    It makes an optimizer for that, which it may not inside a `StatelessScope`. It means to keep the result (and looks
    for it under these names, but keeps it under others: seen with 3.15).
    """
    for kind in ("Operation", "Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss"):
        with contextlib.suppress(ValueError):  # Operation came with 3.11
            global_state.set_global_attribute(f"saving_attr_skiplist_{kind}", get_attr_skipset(kind))


def seed_generator(make: bool) -> Any:
    """Local: what Keras draws from where no seed was given; with `make` False None where nothing was drawn yet."""
    return global_seed_generator() if make else global_state.get_global_attribute("global_seed_generator")
