"""State that is committed and restored, under Horovod's names.

Ranks of one MPI job do not come. When one dies the job ends, and is to be started again from a checkpoint; or, with
`--on-failure shrink`, the others go back to what they committed last, and on from there. So they do when a rank raises
HorovodInternalError; a rank that waits in a collective is told by it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from mpitrain.collectives import objects
from mpitrain.errors import CollectiveError, MismatchError, RankLostError
from mpitrain.horovod.basics import rank, world
from mpitrain.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpitrain.horovod.variables import broadcast_object, broadcast_variables
from mpitrain.runtime import streams
from mpitrain.strategies.strategy import strategy_of
from mpitrain.world import shrink

RESET = "reset of an elastic job"


class HostUpdateResult:
    """What may have happened to the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class State:
    """What an elastic job goes on from."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._updates: list[tuple[float, int]] = []
        self._last_update = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Local: functions to call after a reset."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Local: called after a reset."""
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Local: note that the hosts have changed; the next commit of all ranks finds it."""
        self._updates.append((timestamp, update_res))

    def commit(self) -> None:
        """Collective: save, and see whether the hosts have changed.

        Raises:
            HostsUpdatedInterrupt: on all ranks.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Collective: see whether some rank was told that the hosts have changed.

        Raises:
            HostsUpdatedInterrupt: on all ranks.
        """
        new = [update for update in self._updates if update[0] > self._last_update]
        self._updates.clear()
        everyone = [update for updates in objects.all_gather_obj(new, world=world()) for update in updates]
        if everyone:
            self._last_update = max(timestamp for timestamp, _ in everyone)
            raise HostsUpdatedInterrupt(all(what == HostUpdateResult.removed for _, what in everyone))

    def save(self) -> None:
        """Local: keep a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Local: go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Collective: take rank 0's."""
        raise NotImplementedError

    def reset(self) -> None:
        """Local: what must be made anew after a reset."""


class ObjectState(State):
    """Python objects by name, which become attributes."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = kwargs
        self.restore()

    def save(self) -> None:
        """Local: keep the objects, themselves and not copies."""
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        """Local: the attributes become the objects kept."""
        for name, value in self._saved.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Collective: take rank 0's."""
        if self._saved:
            self._saved = self._bcast_object(self._saved)
            self.restore()


class _VariablesState(ObjectState):
    """Variables, and Python objects."""

    def __init__(self, variables: Sequence[Any], session: Any = None, **kwargs: Any) -> None:
        self._variables, self._session = list(variables), session
        self._broadcast: Any = None
        self._values = self._read()
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Local: keep the values of the variables, and the objects."""
        self._values = self._read()
        super().save()

    def restore(self) -> None:
        """Local: variables and attributes become what was kept."""
        for variable, value in zip(self._variables, self._values, strict=True):
            if self._session is None:
                variable.assign(value)
            else:
                variable.load(value, self._session)
        super().restore()

    def sync(self) -> None:
        """Collective: take rank 0's."""
        if self._session is None:
            broadcast_variables(self._variables, 0)
        else:
            self._broadcast = self._broadcast or broadcast_variables(self._variables, 0)
            self._session.run(self._broadcast)
        self._values = self._read()
        super().sync()

    def _read(self) -> list[Any]:
        if self._session is not None:
            return list(self._session.run(self._variables))
        return [variable.numpy().copy() for variable in self._variables]


class TensorFlowState(_VariablesState):
    """Variables, and Python objects.

    Of a graph of TensorFlow 1 all global variables by default.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        eager = tf.executing_eagerly()
        session = session or (None if eager else tf.compat.v1.get_default_session())
        super().__init__(tf.compat.v1.global_variables() if variables is None else variables, session, **kwargs)


class TensorFlowKerasState(_VariablesState):
    """A model with its optimizer, and Python objects.

    Args:
        model: built.
        optimizer: that of the model by default.
        backend: of no effect.
        kwargs: the objects.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("the model must be built first: call model.build(input_shape)")
        self.model, self.backend = model, backend
        self.optimizer = optimizer or getattr(model, "optimizer", None)  # absent before `compile`
        own = []
        if self.optimizer is not None:
            if not self.optimizer.built:
                self.optimizer.build(model.trainable_variables)
            own = self.optimizer.variables
        super().__init__([*model.variables, *own], **kwargs)


class KerasState(TensorFlowKerasState):
    """As TensorFlowKerasState."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits every few batches, and at the end of each epoch."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit, self.batches_remaining = state, batches_per_commit, batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Local: begin to count."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Collective, at every so many batches: commit."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Collective: commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """`state.batch` is the number of the last batch, and 0 at the end of an epoch.

    Keras 3 fixes the number of steps before callbacks are asked: after a reset give `fit` the rest of the epoch.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Local: note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Local: begin anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """`state.epoch` is the number of epochs that are done, those before a reset included."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.initial_epoch = state, state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Local: note how many are done."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Local: one more."""
        self.state.epoch = self.initial_epoch + epoch + 1


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Local: a function of a State and more, which is called again after each reset.

    When a rank raises HorovodInternalError, or is lost where the job is to survive that, all ranks restore what they
    committed last, take rank 0's, and call the function again; after HostsUpdatedInterrupt without restoring.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except (HorovodInternalError, CollectiveError, tf.errors.OpError) as error:
                if shrink.is_shrinkable(world(), error):
                    _go_on_without()
                    state.restore()
                    state.on_reset()
                    skip_sync = False
                    continue
                if not isinstance(error, HorovodInternalError) and RESET not in str(error):
                    raise
                state.restore()
                skip_sync = False
            _meet()
            state.on_reset()

    return wrapper


def _go_on_without() -> None:
    """Collective among the ranks that are left: the job is theirs.

    Raises:
        TooFewRanksError: on all of them.
    """
    updates: list[int] = []
    while not updates:
        left = shrink.shrink(world())
        with contextlib.suppress(RankLostError):  # another one
            # One of them may have made an update more before it noticed the loss.
            updates = world().communicator.all_gather_obj(world().activity.updates)
    strategy_of(world()).count_from(max(updates))
    if world().is_root:
        streams.write_stderr(
            f"mpitrain: lost: rank {', '.join(map(str, left.lost))}; {world().size} go on from the last commit\n"
        )


def _meet() -> None:
    """Collective: wait until all ranks want to reset; one that is in another collective is told by its error."""
    met = False
    while not met:
        with contextlib.suppress(MismatchError):
            world().agreement.call(RESET)
            met = True
