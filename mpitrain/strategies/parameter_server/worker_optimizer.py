"""A Keras optimizer whose updates are made by parameter servers: its side on a worker."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mpitrain.collectives.ordering import host_call, in_turn
from mpitrain.comm.communicator import Buffer
from mpitrain.errors import UsageError
from mpitrain.runtime import keras_private
from mpitrain.strategies.parameter_server import queries
from mpitrain.strategies.parameter_server.arrays import State
from mpitrain.strategies.parameter_server.sending import Sending
from mpitrain.strategies.parameter_server.server_parts import slots_of
from mpitrain.strategies.parameter_server.setup import refuse, setup_for
from mpitrain.strategies.parameter_server.strategy import ParameterServers
from mpitrain.strategies.weighting import current_samples

ATTRIBUTE = "_mpitrain_served"


class WorkerOptimizer:
    """An optimizer on a worker: its gradients go to the servers, and new values come back.

    It stays plain Keras; its slots are those of the servers when it is saved.

    Raises:
        UsageError: servers cannot do what the optimizer does.
    """

    def __init__(self, optimizer: Any, title: str, strategy: ParameterServers) -> None:
        refuse(optimizer)
        self.optimizer, self._title, self._strategy = optimizer, title, strategy
        self._client = strategy.client
        self._sessions: dict[str, Sending] = {}
        self._variables: dict[int, list[Any]] = {}
        object.__setattr__(optimizer, ATTRIBUTE, self)  # Keras would track what is assigned

    def variables(self, session: Sending) -> list[Any]:
        """Local: of which the gradients are."""
        return self._variables[session.number]

    def begin_anew(self) -> None:
        """Local, on all workers: variables may have been changed here; the servers get them before the next update."""
        for session in self._sessions.values():
            session.begun = False

    def update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Collective in sync mode: the servers make the update, and the variables get their values."""
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            return
        own, kept = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        session = self._session(own, kept)
        # Norms are those of the mean: where servers make one, they clip it.
        clips = self.optimizer.clipnorm or self.optimizer.global_clipnorm
        if clips and self._client.options.mode == "async":  # each gradient is applied by itself
            own = getattr(self.optimizer, keras_private.CLIP_GRADIENTS)(own)
        values, iterations = self._exchange(session, own)
        counter = keras_private.step_counter(self.optimizer)
        counter.assign(tf.cast(iterations, counter.dtype))
        for value, variable in zip(values, kept, strict=True):
            if isinstance(value, tf.IndexedSlices):
                (variable.value if isinstance(variable, keras.Variable) else variable).scatter_update(value)
            else:
                variable.assign(value)

    def assign(self, session: Sending, arrays: Sequence[Buffer]) -> None:
        """Local: the variables get these values, eagerly."""
        for variable, array in zip(self.variables(session), arrays, strict=True):
            variable.assign(array)
        if session.last is not None:
            keras_private.step_counter(self.optimizer).assign(session.last.iterations)

    def fetch(self) -> None:
        """Local: the optimizer's own variables become the servers'."""
        if keras_private.in_stateless_scope():  # a snapshot is being saved, on a thread of its own
            return
        for session in self._sessions.values():
            if not session.begun:
                continue
            state, iterations = queries.state(self._client.channel, session)
            for slots, arrays in zip(self._slots(session), state, strict=True):
                for slot, array in zip(slots, arrays[1:], strict=True):
                    slot.assign(array.reshape(tuple(slot.shape)))
            keras_private.step_counter(self.optimizer).assign(iterations)

    @tf.autograph.experimental.do_not_convert
    def pull_rows(self, variable: Any, indices: Any) -> Any:
        """Local: see `programs.pull_rows`."""
        target = variable.value if isinstance(variable, keras.Variable) else variable
        indices = tf.cast(tf.reshape(indices, [-1]), tf.int64)

        def pulled() -> list[Any]:
            return _call(functools.partial(self._pull_rows, variable), [indices], [target.dtype])

        if tf.executing_eagerly():
            (values,) = pulled()
        else:
            (values,) = in_turn(self._client, pulled)  # type: ignore[arg-type]
        values.set_shape([None, *target.shape[1:]])
        target.scatter_update(tf.IndexedSlices(values, indices))
        return values

    def _pull_rows(self, variable: Any, indices: Any) -> list[Any]:
        for session in self._sessions.values():
            for position, other in enumerate(self.variables(session)):
                if other is variable and session.begun and session.layout.plan.specs[position].sparse:
                    return [queries.rows(self._client.channel, session, position, np.asarray(indices))]
        return [variable.numpy()[indices]]  # nobody has begun: the servers will get these

    def counts(self) -> dict[str, Any]:
        """Local: what the servers have counted; empty before the first update."""
        begun = [session for session in self._sessions.values() if session.begun]
        return queries.counts(self._client.channel, begun[-1]) if begun else {}

    # The update.

    def _exchange(self, session: Sending, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Collective in sync mode: all buckets are pushed, while earlier layers compute; then all are pulled."""
        plan, values = session.layout.plan, list(gradients)
        samples = tf.cast(current_samples(), tf.float64)
        rate = keras_private.learning_rate(self.optimizer)
        rate = (
            tf.cast(rate.value, tf.float64) if isinstance(rate, keras.Variable) else tf.constant(math.nan, tf.float64)
        )
        iterations: list[Any] = []

        def exchange_all() -> list[Any]:
            last: list[Any] = []
            for index, bucket in enumerate(plan.buckets):
                members = [gradients[position] for position in bucket.members]
                tensors = [members[0].values, members[0].indices] if bucket.sparse else members
                with tf.control_dependencies(last):
                    last = _call(functools.partial(self._push, session, index), [samples, rate, *tensors], [tf.int32])
            for index, bucket in enumerate(plan.buckets):
                kinds = [bucket.dtype] * (1 if bucket.sparse else len(bucket.members)) + [tf.int64] * bucket.sparse
                with tf.control_dependencies(last):
                    *outputs, done = _call(functools.partial(self._pull, session, index), [], [*kinds, tf.int64])
                done.set_shape([])
                for position, value in zip(bucket.members, _shaped(outputs, bucket, gradients), strict=True):
                    values[position] = value
                iterations[:] = last = [done]
            return last

        exchange_all() if tf.executing_eagerly() else in_turn(self._client, exchange_all)  # type: ignore[arg-type]
        return values, iterations[0]

    def _push(self, session: Sending, index: int, samples: Any, rate: Any, *arrays: Any) -> list[Any]:
        arrays = tuple(np.asarray(array) for array in arrays)
        activity = self._strategy.world.activity
        try:
            if index == 0 and not session.begun:
                self._begin(session)
            self._strategy.look(session, index, arrays)
            self._client.push(session, index, arrays, float(samples), float(rate))
        except UsageError as error:
            activity.error = error
            raise
        return [np.zeros((), np.int32)]

    def _pull(self, session: Sending, index: int) -> list[Any]:
        arrays = self._client.pull(session, index)
        assert session.last is not None
        if index == len(session.layout.plan.buckets) - 1:
            self._strategy.note(session)
        return [*arrays, np.array(session.last.iterations, np.int64)]

    def _begin(self, session: Sending) -> None:
        """Collective over the workers: the servers get the first one's variables, and these get the servers'."""
        variables = self.variables(session)

        def state() -> State:
            slots = self._slots(session)
            return [
                [np.asarray(v.numpy()) for v in (variable, *own)]
                for variable, own in zip(variables, slots, strict=True)
            ]

        found = self._client.begin(session, state, int(keras_private.step_counter(self.optimizer).numpy()))
        if found is None:  # they are this worker's
            return
        for variable, (value,) in zip(variables, found, strict=True):
            if not np.array_equal(variable.numpy(), value):
                session.discard = True
                variable.assign(value)  # of rows those alone come later that an update changes

    def _session(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sending:
        """Local: of this update; all workers meet theirs in the same order."""
        setup = setup_for(self.optimizer, self._title, gradients, variables, self._client)
        digest = setup["digest"]
        if digest not in self._sessions:
            if not self.optimizer.built:
                with tf.init_scope():
                    self.optimizer.build(list(variables))
            session = self._sessions[digest] = self._client.session(setup)
            self._variables[session.number] = list(variables)
            self._strategy.add(session, self)
        return self._sessions[digest]

    def _slots(self, session: Sending) -> list[list[Any]]:
        """Local: of each variable the slots of this optimizer, in the servers' order.

        A slot that has no variable's name, as the running product of Nadam, belongs to all of them.
        """
        left: dict[str, list[Any]] = {}
        for slot in slots_of(self.optimizer):
            left.setdefault(slot.name, []).append(slot)
        wanted = [session.slot_names[position] for position in range(len(self.variables(session)))]
        known = {name for names in wanted for name in names}
        shared = [slot for name, slots in left.items() if name not in known for slot in slots]
        found = []
        for names in wanted:
            common = iter(shared)
            found.append([left[name].pop(0) if left.get(name) else next(common) for name in names])
        return found


def _call(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Local: a host call: at once, or of the graph that is being traced."""
    if not tf.executing_eagerly():
        return host_call(function, inputs, dtypes)
    return [tf.convert_to_tensor(array) for array in function(*[tensor.numpy() for tensor in inputs])]


def _shaped(outputs: Sequence[Any], bucket: Any, gradients: Sequence[Any]) -> list[Any]:
    """Local: what came back, with static shapes."""
    members = [gradients[position] for position in bucket.members]
    if bucket.sparse:
        outputs[0].set_shape([None, *members[0].values.shape[1:]])
        outputs[1].set_shape([None])
        return [tf.IndexedSlices(outputs[0], outputs[1], members[0].dense_shape)]
    for output, member in zip(outputs, members, strict=True):
        output.set_shape(member.shape)
    return list(outputs)


def served_of(optimizer: Any) -> WorkerOptimizer | None:
    """Local: what parameter servers do for an optimizer, if they do."""
    found: WorkerOptimizer | None = optimizer.__dict__.get(ATTRIBUTE)
    return found
