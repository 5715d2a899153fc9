"""The parameters of one part of an update, and the Keras optimizers that change them, on their server."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.comm.communicator import Buffer
from mpitrain.reduction.buckets import TensorSpec
from mpitrain.runtime import keras_private
from mpitrain.strategies.parameter_server.shards import Part, Shard

OF_SERVER = "_mpitrain_of_server"


def is_of_server(optimizer: Any) -> bool:
    """Local: whether a parameter server makes its updates with it, maybe in the process of a worker."""
    return OF_SERVER in optimizer.__dict__


class ServerShard:
    """Some rows of a variable, with an optimizer of their own.

    One optimizer for each shard: then what belongs to which variable is plain, whatever the optimizer is.

    Args:
        rows: how many there are here; None for a variable without axes.
        setup: what the worker told, see `training.served`.
        position: of the variable in it.
    """

    def __init__(self, spec: TensorSpec, rows: int | None, setup: Mapping[str, Any], position: int) -> None:
        self.shape = spec.shape if rows is None else (rows, *spec.shape[1:])
        self._dtype = spec.dtype
        with _scopes(spec.name) as name:
            self.variable = keras.Variable(np.zeros(self.shape, spec.dtype), name=name, dtype=spec.dtype)
        constraint = setup["constraints"][position]
        self.variable.constraint = None if constraint is None else keras.constraints.deserialize(constraint)
        config = dict(setup["optimizer"])
        # Norms take in what other servers host, so they are found outside.
        config["config"] = {**config["config"], "clipnorm": None, "global_clipnorm": None}
        self.optimizer = optimizer = keras.optimizers.deserialize(config)
        if not setup["decayed"][position]:
            optimizer.exclude_from_weight_decay(var_list=[self.variable])
        object.__setattr__(optimizer, OF_SERVER, True)  # Keras would track what is assigned
        optimizer.build([self.variable])
        rate = keras_private.learning_rate(optimizer)
        self.rate = rate if isinstance(rate, keras.Variable) else None
        self.slots = slots_of(optimizer)
        self.divisor = tf.Variable(1.0, trainable=False)
        keras_private.divide_learning_rate(optimizer, self.divisor)

    @property
    def slot_names(self) -> list[str]:
        """Of the slots; "" of one that belongs to the optimizer as a whole, as the running product of Nadam."""
        own, path = self.variable.name, self.variable.path.replace("/", "_")
        return [slot.name if slot.name == own or slot.name.startswith(f"{path}_") else "" for slot in self.slots]

    def apply(self, gradient: Any) -> Any:
        """Local: update; the new value."""
        self.optimizer.apply([gradient], [self.variable])
        return tf.convert_to_tensor(self.variable.value)

    def state(self) -> list[Buffer]:
        """Local: the value and the slots, in memory that later updates leave alone."""
        return [np.asarray(tf.convert_to_tensor(v.value)) for v in (self.variable, *self.slots)]

    def set_state(self, arrays: Sequence[Buffer]) -> None:
        """Local: what `state` gave; or the value alone."""
        for variable, array in zip((self.variable, *self.slots), arrays, strict=False):
            variable.assign(array.reshape(tuple(variable.shape)))


class ServerPart:
    """All shards of one part.

    Args:
        part: what travels together.
        setup: what the worker told.
        traced: updates are graphs. Those need a thread of TensorFlow's own, which a worker in the same process may
            hold while it waits for the server.
    """

    def __init__(self, part: Part, specs: Sequence[TensorSpec], setup: Mapping[str, Any], traced: bool) -> None:
        keras.config.set_floatx(setup["floatx"])  # of learning rates, as on the workers
        self.part = part
        self.version = 0  # of updates of rows
        self.shards = [
            ServerShard(specs[shard.variable], _rows(specs[shard.variable], shard), setup, shard.variable)
            for shard in (piece.shard for piece in part.pieces)
        ]
        self._changed = np.zeros(self.shards[0].shape[0] if part.sparse else 0, np.int64)
        self._by_rows = _ByRows(specs, part, setup, self.shards[0], traced) if part.sparse else None
        self._values: list[Any] | None = None
        self._update = tf.function(self._apply, autograph=False) if traced else self._apply

    @property
    def iterations(self) -> int:
        """Of the optimizers, which have all made as many."""
        return int(keras_private.step_counter(self.shards[0].optimizer).numpy())

    def set_iterations(self, number: int) -> None:
        """Local: as many as another optimizer has made."""
        for shard in self.shards:
            keras_private.step_counter(shard.optimizer).assign(number)

    def update(self, mean: Buffer, learning_rate: float, divisor: float, factors: Sequence[float]) -> None:
        """Local: one update of dense shards.

        Args:
            mean: gradients, packed.
            learning_rate: of the worker's optimizer; NaN for that of the schedule.
            divisor: of the learning rate.
            factors: on the gradient of each shard.
        """
        self._set_rate(learning_rate, divisor)
        gradients = []
        for piece, shard, factor in zip(self.part.pieces, self.shards, factors, strict=True):
            gradient = mean[piece.offset : piece.offset + piece.shard.size].reshape(shard.shape)
            gradients.append(
                tf.convert_to_tensor(gradient if factor == 1.0 else gradient * gradient.dtype.type(factor))
            )
        self._values = list(self._update(*gradients))

    def update_rows(self, values: Buffer, indices: Buffer, learning_rate: float, divisor: float, factor: float) -> None:
        """Local: one update of some rows, which alone are changed, and their slots.

        Args:
            values: (n, ...) gradients.
            indices: (n,) rows of this shard, each once.
            learning_rate: as for `update`.
            divisor: of the learning rate.
            factor: on the gradients.
        """
        assert self._by_rows is not None
        self._set_rate(learning_rate, divisor)
        self.version += 1
        self._changed[indices] = self.version
        self._by_rows.update(values if factor == 1.0 else values * values.dtype.type(factor), indices)

    def _set_rate(self, learning_rate: float, divisor: float) -> None:
        for shard in self.shards:
            # NaN, which is not equal to itself, leaves the rate to the schedule.
            if shard.rate is not None and learning_rate == learning_rate:
                shard.rate.assign(learning_rate)
            shard.divisor.assign(divisor)

    def _apply(self, *gradients: Any) -> list[Any]:
        return [shard.apply(gradient) for shard, gradient in zip(self.shards, gradients, strict=True)]

    def packed(self) -> Buffer:
        """Local: all values, as they travel; memory that later updates leave alone."""
        if self._values is None:
            self._values = [tf.convert_to_tensor(shard.variable.value) for shard in self.shards]
        arrays = [np.asarray(value).reshape(-1) for value in self._values]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def rows(self, indices: Buffer) -> Buffer:
        """Local: some rows of a sparse part."""
        return np.asarray(tf.gather(self.shards[0].variable.value, indices))

    def rows_since(self, version: int) -> Buffer:
        """Local: numbers of the rows that were changed after that version."""
        return np.flatnonzero(self._changed > version)

    def states(self) -> list[list[Buffer]]:
        """Local: of each shard its value and slots."""
        return [shard.state() for shard in self.shards]

    def set_state(self, arrays: Sequence[Sequence[Buffer]], iterations: int) -> None:
        """Local: of each shard what `HostedShard.state` gave."""
        for shard, state in zip(self.shards, arrays, strict=True):
            shard.set_state(state)
        self.set_iterations(iterations)
        self._values = None


class _ByRows:
    """Updates of some rows by the same Keras optimizer, on a table that holds these rows alone.

    Rows are filled up to a power of two, so that few such tables do for all.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], part: Part, setup: Mapping[str, Any], whole: ServerShard, traced: bool
    ) -> None:
        self._traced = traced
        position = part.pieces[0].shard.variable
        self._spec, self._setup, self._position, self._whole = specs[position], setup, position, whole
        self._tables: dict[int, tuple[ServerShard, Any]] = {}

    def update(self, values: Buffer, indices: Buffer) -> None:
        """Local: as `HostedPart.update_rows`."""
        if not len(indices):
            # A step all the same: learning rates and corrections go by their number.
            keras_private.step_counter(self._whole.optimizer).assign_add(1)
            return
        # Filled up to a power of two, so that few graphs serve all numbers of rows.
        size = 1 << max(3, int(len(indices) - 1).bit_length())
        if size not in self._tables:
            shard = ServerShard(self._spec, size, self._setup, self._position)
            run = self._run(shard)
            self._tables[size] = shard, tf.function(run, autograph=False) if self._traced else run
        gradient = np.zeros((size, *values.shape[1:]), values.dtype)
        gradient[: len(indices)] = values
        padded = np.zeros(size, np.int64)
        padded[: len(indices)] = indices
        self._tables[size][1](tf.constant(gradient), tf.constant(padded), tf.constant(len(indices), tf.int32))

    def _run(self, table: ServerShard) -> Any:
        whole = self._whole
        rows = whole.shape[0]
        pairs = [(whole.variable, table.variable), *zip(whole.slots, table.slots, strict=True)]

        def run(gradient: Any, indices: Any, count: Any) -> None:
            keras_private.step_counter(table.optimizer).assign(keras_private.step_counter(whole.optimizer).value)
            table.divisor.assign(whole.divisor)
            if table.rate is not None and whole.rate is not None:
                table.rate.assign(whole.rate.value)
            for source, target in pairs:
                target.assign(tf.gather(source.value, indices) if _has_rows(source, rows) else source.value)
            table.apply(gradient)
            for source, target in pairs:
                if _has_rows(source, rows):
                    slices = tf.IndexedSlices(target.value[:count], indices[:count])
                    source.value.scatter_update(slices)
                else:
                    source.assign(target.value)
            keras_private.step_counter(whole.optimizer).assign(keras_private.step_counter(table.optimizer).value)

        return run


def slots_of(optimizer: Any) -> list[Any]:
    """Local: the variables of a built Keras optimizer but the number of updates and the learning rate."""
    others = (id(keras_private.step_counter(optimizer)), id(keras_private.learning_rate(optimizer)))
    return [variable for variable in optimizer.variables if id(variable) not in others]


def _has_rows(slot: Any, rows: int) -> bool:
    return len(slot.shape) > 0 and slot.shape[0] == rows


def _rows(spec: TensorSpec, shard: Shard) -> int | None:
    return shard.end - shard.begin if spec.shape else None


@contextlib.contextmanager
def _scopes(path: str) -> Iterator[str]:
    """Local: within this a variable of the name that is given gets `path` as its path."""
    *scopes, name = re.sub(r"[^A-Za-z0-9_./-]", "_", path).split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        yield name
