"""A Keras optimizer whose updates are made by parameter servers."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope  # no public name leads to it

from mpitrain.collectives.ordering import host_call, in_turn
from mpitrain.comm.communicator import Buffer
from mpitrain.errors import NonFiniteError, UsageError
from mpitrain.reduction.finite import REMEDY
from mpitrain.strategies.exchange import Exchange
from mpitrain.strategies.hooks import ATTRIBUTE, Hook
from mpitrain.strategies.parameter_server.arrays import State
from mpitrain.strategies.parameter_server.connection import client_of
from mpitrain.strategies.parameter_server.hosted import slots_of
from mpitrain.strategies.parameter_server.messages import ACTIVE, REQUEST, SAMPLES
from mpitrain.strategies.parameter_server.sending import Sending
from mpitrain.strategies.parameter_server.setup import refuse, setup_for
from mpitrain.strategies.weighting import current_samples
from mpitrain.world.agreement import Agreed
from mpitrain.world.world import World

LOOKED_AT_BYTES = 1 << 20


class ServedExchange(Exchange):
    """What the workers of one job exchange: gradients and parameters with the servers, the rest among themselves."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.client = client_of(world)
        self._hooks: weakref.WeakValueDictionary[int, ServedHook] = weakref.WeakValueDictionary()

    @property
    def in_step(self) -> bool:
        """All workers have the same parameters after each update."""
        return self.client.in_step and self.client.options.rows == "changed"

    def add(self, session: Sending, hook: ServedHook) -> None:
        """Local: whose variables those of a session are."""
        self._hooks[session.number] = hook

    def join(self, finished: bool = False, collectives: bool = False) -> int:
        """Collective: wait until all workers are here; the variables are then the servers', the same on all."""
        if finished:
            self.world.agreement.leave()
            return 0
        for session, arrays in self.client.join(self._values):
            hook = self._hooks.get(session.number)
            if hook is not None:
                hook.assign(session, arrays)
        return 0

    def catch_up(self) -> None:
        """Collective: after the loss of ranks, the variables become those of the servers."""
        self.join()

    def done(self) -> dict[int, int]:
        """Local: of ranks, by their numbers in the job, how many gradients the servers have used or dropped."""
        return self.client.done()

    def _values(self, session: Sending) -> Sequence[Buffer]:
        hook = self._hooks.get(session.number)
        if hook is None:  # the program has dropped the optimizer
            return [np.zeros(spec.shape, spec.dtype) for spec in session.layout.plan.specs]
        return [np.array(variable.numpy()) for variable in hook.variables(session)]

    def note(self, session: Sending) -> None:
        """Local: an update is done."""
        statistics, activity, answer = self.reducer.statistics, self.world.activity, session.last
        assert answer is not None
        statistics.updates += 1
        activity.updates = statistics.updates
        if activity.phase == "start":
            activity.phase = "compute"
        statistics.exchange = self.client.pushing_seconds
        waited = self.client.waiting_seconds - statistics.waiting
        statistics.waiting += waited
        self.world.agreement.waiting_seconds += waited
        statistics.samples_global = max(statistics.samples_global, answer.samples)
        if self.in_step:
            table = answer.workers
            columns = (table[:, SAMPLES], table[:, REQUEST + 1 :], table[:, REQUEST])
            self.reducer.agreed = Agreed(1, *columns, table[:, ACTIVE] > 0)

    def look(self, session: Sending, bucket: int, arrays: Sequence[Buffer]) -> None:
        """Local: this worker's gradients are finite.

        Raises:
            NonFiniteError: they are not, and that is to end the job.
        """
        action = self.reducer.finite.action
        if action == "ignore":
            return
        members = session.layout.plan.buckets[bucket].members
        for member, array in zip(members, arrays, strict=False):
            flat = array.reshape(-1)[: LOOKED_AT_BYTES // array.itemsize]
            total = np.add.reduce(flat) if flat.size else 0.0
            if total - total == 0 or np.isfinite(flat).all():
                continue
            number = self.world.agreement.name([self.world.rank])
            text = (
                f"the gradient of {session.layout.plan.specs[member].name} is not finite on {number} in update "
                f"{self.reducer.statistics.updates + 1}. {REMEDY}"
            )
            if action == "stop":
                self.world.activity.error = error = NonFiniteError(text)
                raise error
            if session.number not in self._warned:
                self._warned.add(session.number)
                from mpitrain.runtime import streams

                streams.write_stderr(f"mpitrain: warning: {text}\n")

    @functools.cached_property
    def _warned(self) -> set[int]:
        return set()


class ServedHook(Hook):
    """Gradients go to the servers, and new values come back.

    The optimizer stays plain Keras; its slots are those of the servers when it is saved.
    """

    served = True
    exchange: ServedExchange

    def __init__(self, optimizer: Any, exchange: ServedExchange) -> None:
        refuse(optimizer)
        super().__init__(optimizer, exchange)
        self._sessions: dict[str, Sending] = {}
        self._variables: dict[int, list[Any]] = {}

    def install(self) -> None:
        """Local: patch the optimizer."""
        optimizer = self.optimizer
        save, finalize = optimizer.save_own_variables, optimizer.finalize_variable_values

        def save_own_variables(store: Any) -> None:
            self.fetch_state()
            save(store)

        def finalize_variable_values(variables: Any) -> None:
            if optimizer.use_ema:
                self.fetch_state()
            finalize(variables)

        # object.__setattr__: Keras tracks what is assigned to an optimizer; this is none of its state.
        for name, value in (
            (ATTRIBUTE, self),
            ("apply", self.apply),
            ("save_own_variables", save_own_variables),
            ("finalize_variable_values", finalize_variable_values),
        ):
            object.__setattr__(optimizer, name, value)

    def remove(self) -> None:
        """Local: the optimizer is as it was."""
        for name in (ATTRIBUTE, "apply", "save_own_variables", "finalize_variable_values"):
            if name in self.optimizer.__dict__:
                object.__delattr__(self.optimizer, name)

    def variables(self, session: Sending) -> list[Any]:
        """Local: of which the gradients are."""
        return self._variables[session.number]

    def begin_anew(self) -> None:
        """Local, on all workers: variables may have been changed here; the servers get them before the next update."""
        for session in self._sessions.values():
            session.begun = False

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Collective in sync mode: as `Optimizer.apply`, by the servers."""
        grads = list(grads)
        if trainable_variables is None:
            variables = list(self.optimizer._trainable_variables)
        else:
            variables = list(trainable_variables)
        if self.captured is not None:
            self.captured.append((grads, variables))
        else:
            self.apply_means(self.prepare(grads, variables), variables)

    def prepare(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Collective in sync mode: the new value for each gradient; None stays None."""
        present = [position for position, gradient in enumerate(grads) if gradient is not None]
        result: list[Any] = [None] * len(grads)
        if not present:
            return result
        own, kept = [grads[position] for position in present], [variables[position] for position in present]
        session = self._session(own, kept)
        clips = self.optimizer.clipnorm or self.optimizer.global_clipnorm
        if clips and self.exchange.client.options.mode == "async":  # each gradient is applied by itself
            own = self.optimizer._clip_gradients(own)
        values, iterations = self._exchange(session, own)
        for position, value in zip(present, values, strict=True):
            result[position] = value
        self.optimizer._iterations.assign(tf.cast(iterations, self.optimizer._iterations.dtype))
        return result

    def apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> None:
        """Local: the variables get the values that `prepare` gave."""
        for value, variable in zip(means, variables, strict=True):
            if isinstance(value, tf.IndexedSlices):
                (variable.value if isinstance(variable, keras.Variable) else variable).scatter_update(value)
            elif value is not None:
                variable.assign(value)

    def assign(self, session: Sending, arrays: Sequence[Buffer]) -> None:
        """Local: the variables get these values, eagerly."""
        for variable, array in zip(self.variables(session), arrays, strict=True):
            variable.assign(array)
        if session.last is not None:
            self.optimizer._iterations.assign(session.last.iterations)

    def fetch_state(self) -> None:
        """Local: the optimizer's own variables become the servers'."""
        if in_stateless_scope():  # a snapshot is being saved, on a thread of its own
            return
        for session in self._sessions.values():
            if not session.begun:
                continue
            state, iterations = self.exchange.client.state(session)
            for slots, arrays in zip(self._slots(session), state, strict=True):
                for slot, array in zip(slots, arrays[1:], strict=True):
                    slot.assign(array.reshape(tuple(slot.shape)))
            self.optimizer._iterations.assign(iterations)

    @tf.autograph.experimental.do_not_convert
    def pull_rows(self, variable: Any, indices: Any) -> Any:
        """Local: see `servers.pull_rows`."""
        target = variable.value if isinstance(variable, keras.Variable) else variable
        indices = tf.cast(tf.reshape(indices, [-1]), tf.int64)

        def pulled() -> list[Any]:
            return _call(functools.partial(self._pull_rows, variable), [indices], [target.dtype])

        if tf.executing_eagerly():
            (values,) = pulled()
        else:
            (values,) = in_turn(self.exchange.client, pulled)  # type: ignore[arg-type]
        values.set_shape([None, *target.shape[1:]])
        target.scatter_update(tf.IndexedSlices(values, indices))
        return values

    def _pull_rows(self, variable: Any, indices: Any) -> list[Any]:
        for session in self._sessions.values():
            for position, other in enumerate(self.variables(session)):
                if other is variable and session.begun and session.layout.plan.specs[position].sparse:
                    return [self.exchange.client.rows(session, position, np.asarray(indices))]
        return [variable.numpy()[indices]]  # nobody has begun: the servers will get these

    def counts(self) -> dict[str, Any]:
        """Local: what the servers have counted; empty before the first update."""
        begun = [session for session in self._sessions.values() if session.begun]
        return self.exchange.client.counts(begun[-1]) if begun else {}

    # The update.

    def _exchange(self, session: Sending, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Collective in sync mode: all buckets are pushed, while earlier layers compute; then all are pulled."""
        plan, values = session.layout.plan, list(gradients)
        samples = tf.cast(current_samples(), tf.float64)
        rate = self.optimizer._learning_rate
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

        exchange_all() if tf.executing_eagerly() else in_turn(self.exchange.client, exchange_all)  # type: ignore[arg-type]
        return values, iterations[0]

    def _push(self, session: Sending, index: int, samples: Any, rate: Any, *arrays: Any) -> list[Any]:
        arrays = tuple(np.asarray(array) for array in arrays)
        activity = self.exchange.world.activity
        try:
            if index == 0 and not session.begun:
                self._begin(session)
            self.exchange.look(session, index, arrays)
            self.exchange.client.push(session, index, arrays, float(samples), float(rate))
        except UsageError as error:
            activity.error = error
            raise
        return [np.zeros((), np.int32)]

    def _pull(self, session: Sending, index: int) -> list[Any]:
        arrays = self.exchange.client.pull(session, index)
        assert session.last is not None
        if index == len(session.layout.plan.buckets) - 1:
            self.exchange.note(session)
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

        found = self.exchange.client.begin(session, state, int(self.optimizer._iterations.numpy()))
        if found is not None and not session.discard:
            session.discard = any(
                not np.array_equal(variable.numpy(), own[0]) for variable, own in zip(variables, found, strict=True)
            )

    def _session(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sending:
        """Local: of this update; all workers meet theirs in the same order."""
        setup = setup_for(self.optimizer, self._title, gradients, variables, self.exchange.client)
        digest = setup["digest"]
        if digest not in self._sessions:
            if not self.optimizer.built:
                with tf.init_scope():
                    self.optimizer.build(list(variables))
            session = self._sessions[digest] = self.exchange.client.session(setup)
            self._variables[session.number] = list(variables)
            self.exchange.add(session, self)
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
