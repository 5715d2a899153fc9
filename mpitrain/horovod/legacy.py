"""Optimizers, variables and hooks of TensorFlow 1, under Horovod's names: graphs that sessions run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mpitrain.horovod.basics import Adasum
from mpitrain.horovod.gradients import LocalVariables, Options, exchange_for, scaled
from mpitrain.horovod.operations import allreduce
from mpitrain.strategies.strategy import Update

v1 = tf.compat.v1


class LegacyOptimizer(v1.train.Optimizer):  # type: ignore[name-defined]
    """Wraps an optimizer of TensorFlow 1: `compute_gradients` gives the gradients of all ranks.

    With Adasum the optimizer first moves the variables by this rank's gradients, and what it moved them by is combined
    (Maleki et al., 2021). Gradients (with Adasum: moves) of `backward_passes_per_step` steps are added up first, or
    averaged.

    Raises:
        ValueError: gradients are to be added up where steps run eagerly.
    """

    def __init__(
        self,
        optimizer: Any,
        options: Options,
        name: str | None,
        use_locking: bool,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        if backward_passes_per_step > 1 and tf.executing_eagerly():
            raise ValueError("backward_passes_per_step above 1 is for graphs with an optimizer of TensorFlow 1")
        if options.op == Adasum and options.process_set.process_set_id != 0:
            raise NotImplementedError("Adasum is for all ranks only, not for a process set")
        self._optimizer, self._options = optimizer, options
        self._exchange = exchange_for(options)
        self._local = LocalVariables() if self._exchange is None else self._exchange.local
        self._passes, self._average = backward_passes_per_step, average_aggregated_gradients
        self._is_last: Any = None

    def register_local_var(self, var: Any) -> None:
        """Local: the gradient of this variable stays each rank's own."""
        self._local.add(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Collective: pairs of gradients and variables."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._options.op == Adasum:
            return list(pairs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._passes > 1:
            return list(zip(self._of_several(gradients, variables), variables, strict=True))
        return list(zip(self._reduced(gradients, variables), variables, strict=True))

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective: the gradients of all ranks; this rank's own where it is not in the process set."""
        if self._exchange is None:
            return list(gradients)
        return self._exchange.reduced(gradients, variables, Update(f"gradients of {self.get_name()}"))

    def _of_several(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective, at the last of several steps: the sum of their gradients, zeros at the others."""
        positions = [index for index, gradient in enumerate(gradients) if gradient is not None]
        count = _variable("passes", tf.zeros([], tf.int64))
        own_of = {index: tf.convert_to_tensor(gradients[index]) for index in positions}
        sums = [_variable(f"sum_{index}", tf.zeros(variables[index].shape, own_of[index].dtype)) for index in positions]
        added = [total.assign_add(own_of[index]) for total, index in zip(sums, positions, strict=True)]
        with tf.control_dependencies(added):
            self._is_last = tf.equal(count.assign_add(1) % self._passes, 0)

        def reduce() -> list[Any]:
            totals = [total.read_value() for total in sums]
            # A session runs what is ready: without this the sums might be cleared before they are read.
            with tf.control_dependencies(totals):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(cleared):
                factor = 1.0 / self._passes if self._average else 1.0
                own = [scaled(tf.identity(total), factor) for total in totals]
            return self._reduced(own, [variables[index] for index in positions])

        values = tf.cond(self._is_last, reduce, lambda: [tf.zeros_like(total) for total in sums])
        result: list[Any] = [None] * len(gradients)
        for index, value in zip(positions, values, strict=True):
            result[index] = value
        return result

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Local; collective with Adasum: as the optimizer's own."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if self._options.op == Adasum:
            return self._apply_moves(pairs, apply)
        if self._is_last is None:
            return apply()
        # Not within the branch below, where no variable may be made.
        self._optimizer._create_slots([variable for _, variable in pairs])
        return tf.cond(self._is_last, lambda: tf.group(apply()), tf.no_op)

    def _apply_moves(self, pairs: Sequence[tuple[Any, Any]], apply: Any) -> Any:
        """Collective: the Adasum of what each rank's update, or several of them, changes."""
        variables = [v for gradient, v in pairs if gradient is not None and v not in self._local]
        if tf.executing_eagerly():
            before = [tf.identity(variable) for variable in variables]
            done = apply()
            for variable, start in zip(variables, before, strict=True):
                variable.assign(start + self._combined(variable - start))
            return done
        count = _variable("passes", tf.zeros([], tf.int64))
        starts = [_variable(f"start_{index}", tf.zeros(v.shape, v.dtype)) for index, v in enumerate(variables)]
        # Where variables were before the first of these steps; later ones leave that as it is.
        keep = [
            start.assign(tf.where(tf.equal(count % self._passes, 0), variable, start))
            for start, variable in zip(starts, variables, strict=True)
        ]
        with tf.control_dependencies(keep):
            done = apply()
        with tf.control_dependencies([done]):
            is_last = tf.equal(count.assign_add(1) % self._passes, 0)

        def combine() -> Any:
            moved = [
                variable.assign(start + self._combined(variable.read_value() - start))
                for variable, start in zip(variables, starts, strict=True)
            ]
            return tf.group(*moved)

        return tf.cond(is_last, combine, tf.no_op)

    def _combined(self, move: Any) -> Any:
        return allreduce(move, op=Adasum, compression=self._options.compression)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Local: the optimizer's own."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Local: the optimizer's own."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Local: the optimizer's own."""
        return self._optimizer.variables(*args, **kwargs)


def _variable(name: str, value: Any) -> Any:
    """Local: a variable of the graph that is this rank's own, set with the global ones."""
    return v1.Variable(value, trainable=False, use_resource=True, name=f"mpitrain_{name}")


def broadcast_global_variables(root_rank: int) -> Any:
    """Collective when run: an operation after which all global variables are those of rank `root_rank`.

    Raises:
        RuntimeError: there are no global variables where steps run eagerly.
    """
    from mpitrain.horovod.variables import broadcast_variables

    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables is for graphs of TensorFlow 1; call hvd.broadcast_variables(model.variables, "
            "root_rank) instead"
        )
    return broadcast_variables(v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):  # type: ignore[name-defined]
    """All global variables become those of rank `root_rank` when a session has been made."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device, self.bcast_op = root_rank, device, None

    def begin(self) -> None:
        """Local: the operation, if this graph has it not yet."""
        # One hook may be given to several sessions, each with a graph of its own.
        if self.bcast_op is None or self.bcast_op.graph is not v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Collective: run it."""
        session.run(self.bcast_op)
