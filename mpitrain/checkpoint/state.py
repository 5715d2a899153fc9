"""What a checkpoint holds of a model under training, and how it gets into another process.

Variables that the exchange keeps identical on all ranks (weights that are trained, the optimizer's state with the loss
scale) are taken from rank 0. All others may be each rank's own (moments of batch normalization between two means,
random streams, metrics, accumulated gradients): where they differ from those of rank 0, rank 0 is given them too.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from mpitrain.errors import UsageError
from mpitrain.runtime import keras_private
from mpitrain.runtime.counted import counted
from mpitrain.strategies.replicas import has_value, name_of, part_streams
from mpitrain.training.optimizer import hook_of, replicated_state
from mpitrain.world.world import World

Array = NDArray[Any]
# What becomes of the values of all ranks when there are other ranks than before.
Rule = Literal["mean", "zero", "first"]
ACCUMULATED = "accumulated"


@dataclass(frozen=True)
class Item:
    """One variable."""

    key: str  # its name in the checkpoint
    variable: Any  # of Keras or TensorFlow
    rule: Rule | None  # None if it is the same on all ranks


def items_of(model: Any) -> list[Item]:
    """Local: all variables of a model and its optimizer but the metrics, in the same order on all ranks and runs."""
    optimizer, hook = model.optimizer, hook_of(model.optimizer)
    replicated = {id(v) for v in (*model.trainable_variables, *replicated_state(optimizer))}
    inner = hasattr(optimizer, "inner_optimizer")
    accumulated = [] if inner else keras_private.accumulated_gradients(optimizer)
    if hook is not None and hook.accumulation_steps:
        accumulated.append(hook.accumulated_samples)
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    items: list[Item] = []
    seen: set[int] = set(metrics)
    for kind, variables in (
        ("trainable", model.trainable_variables),
        (ACCUMULATED, accumulated),
        ("optimizer", optimizer.variables),
        ("other", model.variables),
    ):
        for index, variable in enumerate(variables):
            if id(variable) not in seen and has_value(variable):
                seen.add(id(variable))
                rule: Rule | None = "mean" if keras.backend.is_float_dtype(variable.dtype) else "first"
                rule = "zero" if kind == ACCUMULATED else None if id(variable) in replicated else rule
                items.append(Item(f"{kind}/{index}", variable, rule))
    return items


def metrics_of(model: Any) -> list[Any]:
    """Local: the variables of the metrics that exist by now."""
    return [v for metric in model.metrics for v in metric.variables if has_value(v)]


def capture(model: Any, world: World, reusable: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Collective: copies of everything, on rank 0; on the others nothing.

    The rest of the training may go on as soon as this returns. `reusable` are arrays of an earlier snapshot that nobody
    needs any more: new memory costs more than the copy.
    """
    hook = hook_of(model.optimizer)
    if hook is not None:
        hook.exchange.fetch_state(hook.update)
    items = items_of(model)
    own = {item.key: item.variable for item in items if item.rule is not None}
    own |= {f"metric/{index}": variable for index, variable in enumerate(metrics_of(model))}
    values = {key: _copy(variable) for key, variable in own.items()} | _random_states()
    # Compared before anything is gathered: arrays of other shapes would shift all that stand behind them.
    description = "\n".join(f"{key} {value.dtype.name}{list(value.shape)}" for key, value in values.items())
    world.agreement.call(f"checkpoint of {counted(len(values), 'value')} of each rank\n{description}")
    others = _gather_different(values, world) if world.size > 1 else {}
    if not world.is_root:
        return {}
    before = reusable or {}
    common = {item.key: _copy(item.variable, before.get(item.key)) for item in items if item.rule is None}
    return common | values | others


def labels_of(model: Any) -> dict[str, str]:
    """Local: names of the variables, by their names in the checkpoint."""
    return {item.key: name_of(item.variable) for item in items_of(model)}


def check_fits(model: Any, arrays: Mapping[str, Array], labels: Mapping[str, str], source: str) -> None:
    """Local: whether the checkpoint is of a model and an optimizer like these.

    Raises:
        UsageError: naming the first difference.
    """
    hint = "give the model and optimizer of that run, another --checkpoint-dir, or --resume never"
    expected = {item.key: item.variable for item in items_of(model) if not item.key.startswith(ACCUMULATED)}
    for key, variable in expected.items():
        shape, dtype = tuple(variable.shape), np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
        here = f"{name_of(variable)} of shape {shape} and type {dtype.name}"
        if key not in arrays:
            raise UsageError(f"{source} has nothing for {here}: {hint}")
        found = arrays[key]
        if (found.shape, found.dtype) != (shape, dtype):
            there = f"{labels.get(key, key)} of shape {found.shape} and type {found.dtype.name}"
            raise UsageError(f"{source} holds {there} where this run has {here}: {hint}")
    more = next((key for key in labels if key not in expected and not key.startswith(ACCUMULATED)), None)
    if more is not None:
        raise UsageError(f"{source} holds {labels[more]}, which this run has not: {hint}")


def restore(model: Any, arrays: Mapping[str, Array], ranks: int, world: World) -> None:
    """Local: the variables become those of the checkpoint; `DataParallel` must have begun.

    With as many ranks as there were, each gets its own values and random states. With others, moments become the
    mean, sums of gradients that no update has used yet are dropped, and random streams are parted anew.
    """
    same = ranks == world.size
    for item in items_of(model):
        value: Array | None = _of_rank(arrays, item.key, world.rank if same else 0)
        if item.rule == "zero" and (value is None or not same):
            value = np.zeros(tuple(item.variable.shape), tf.as_dtype(item.variable.dtype).as_numpy_dtype)
        elif item.rule == "mean" and not same:
            value = _mean(arrays, item.key, ranks)
        assert value is not None  # check_fits
        item.variable.assign(value.reshape(tuple(item.variable.shape)))
    if same:
        _set_random_states({key: _of_rank(arrays, key, world.rank) for key in _random_states()})
    else:
        part_streams(model.variables, world=world)


def add_metrics(model: Any, arrays: Mapping[str, Array], ranks: int, world: World) -> None:
    """Local: add what the metrics of this epoch had counted before; to be called after the first step.

    The state of Keras metrics is made of sums and counts. With other ranks than before, rank 0 takes all of it.
    """
    for index, variable in enumerate(metrics_of(model)):
        key = f"metric/{index}"
        if key not in arrays or arrays[key].shape != tuple(variable.shape):
            continue
        if ranks == world.size:
            before: Any = _of_rank(arrays, key, world.rank)
        elif world.is_root:
            before = sum(np.asarray(_of_rank(arrays, key, rank), np.float64) for rank in range(ranks))
        else:
            continue
        variable.assign_add(np.asarray(before).astype(arrays[key].dtype))


def _of_rank(arrays: Mapping[str, Array], key: str, rank: int) -> Any:
    """What rank `rank` had: its own, or what was the same as on rank 0."""
    return arrays.get(f"rank {rank}/{key}", arrays.get(key))


def _mean(arrays: Mapping[str, Array], key: str, ranks: int) -> Array:
    values = [_of_rank(arrays, key, rank) for rank in range(ranks)]
    if all(value is values[0] for value in values):
        return values[0]  # type: ignore[no-any-return]
    total = np.sum([np.asarray(value, np.float64) for value in values], axis=0)
    return np.asarray(total / ranks).astype(values[0].dtype)


def _copy(variable: Any, target: Array | None = None) -> Array:
    """A value that later updates do not change, in `target` if that fits: `numpy()` of a tensor is a copy."""
    if target is None or not isinstance(variable, keras.Variable):
        return np.asarray(variable.numpy())
    value = np.asarray(tf.convert_to_tensor(variable.value))  # on a CPU the variable's own memory
    if (value.shape, value.dtype) != (target.shape, target.dtype):
        return np.array(value)
    np.copyto(target, value)
    return target


def _gather_different(values: Mapping[str, Array], world: World) -> dict[str, Array]:
    """Collective: on rank 0, the values of other ranks that differ from its own, under the names of their ranks."""
    names = list(values)
    own = np.array([zlib.crc32(_bytes(values[name]).data) for name in names], np.int64)
    sums = np.zeros((world.size, len(names)), np.int64)
    world.communicator.all_gather(own, sums)
    found: dict[str, Array] = {}
    for rank in range(1, world.size):
        different = [names[place] for place in np.flatnonzero(sums[rank] != sums[0])]
        if world.rank == rank and different:
            world.communicator.isend(np.concatenate([_bytes(values[name]) for name in different]), 0).wait()
        elif world.is_root and different:
            buffer = np.empty(sum(values[name].nbytes for name in different), np.uint8)
            world.communicator.irecv(buffer, rank).wait()
            begin = 0
            for name in different:
                value = buffer[begin : begin + values[name].nbytes].view(values[name].dtype)
                found[f"rank {rank}/{name}"] = value.reshape(values[name].shape)
                begin += values[name].nbytes
    return found


def _bytes(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _random_states() -> dict[str, Array]:
    """Local: the states of Python's, NumPy's, TensorFlow's and Keras' own generators."""
    of_keras = keras_private.seed_generator(make=False)
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    assert kind == "MT19937"
    return {
        "random/python": np.array([version, *numbers, gauss is not None], np.uint64),
        "random/python gauss": np.array([gauss or 0.0]),
        "random/numpy": np.array([*keys, position, has_gauss], np.uint64),
        "random/numpy gauss": np.array([cached]),
        "random/tensorflow": np.asarray(tf.random.get_global_generator().state.numpy()),
        "random/keras": np.zeros(2, np.uint32) if of_keras is None else _copy(of_keras.state),
        "random/keras is used": np.array([of_keras is not None]),
    }


def _set_random_states(states: Mapping[str, Array | None]) -> None:
    """Local: what `_random_states` told in another process; what is missing stays as it is."""
    python, numpy = states.get("random/python"), states.get("random/numpy")
    python_gauss, numpy_gauss = states.get("random/python gauss"), states.get("random/numpy gauss")
    if python is not None and python_gauss is not None:
        version, *numbers, has_gauss = (int(number) for number in python)
        random.setstate((version, tuple(numbers), float(python_gauss[0]) if has_gauss else None))
    if numpy is not None and numpy_gauss is not None:
        keys, (position, has) = numpy[:-2].astype(np.uint32), (int(number) for number in numpy[-2:])
        np.random.set_state(("MT19937", keys, position, has, float(numpy_gauss[0])))  # noqa: NPY002
    tensorflow, of_keras, is_used = (states.get(f"random/{name}") for name in ("tensorflow", "keras", "keras is used"))
    if tensorflow is not None:
        tf.random.get_global_generator().state.assign(tensorflow)
    if of_keras is not None and is_used is not None and is_used[0]:
        keras_private.seed_generator(make=True).state.assign(of_keras)
