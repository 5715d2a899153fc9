"""What elastic scripts commit, and what all ranks go back to."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from mpitrain.errors import CollectiveError
from mpitrain.horovod import basics, elastic, operations, variables
from mpitrain.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from mpitrain.horovod.elastic import HostUpdateResult
from mpitrain.world.world import World
from tests.unit.horovod.job import run


def objects(**kwargs: Any) -> Any:
    return elastic.ObjectState(variables.broadcast_object, basics.rank, **kwargs)


def test_objects_are_restored_and_become_rank_0s() -> None:
    def rank(world: World) -> None:
        state = objects(epoch=world.rank, best={"loss": float(world.rank)})
        assert (state.epoch, state.best) == (world.rank, {"loss": float(world.rank)})
        state.epoch = 7 + world.rank
        state.restore()
        assert state.epoch == world.rank
        state.epoch = 7 + world.rank
        state.save()
        state.epoch = -1
        state.restore()
        assert state.epoch == 7 + world.rank
        state.sync()
        assert (state.epoch, state.best) == (7, {"loss": 0.0})
        state.epoch = -1
        state.restore()
        assert state.epoch == 7, "rank 0's is what is kept"
        objects().sync()  # of nothing

    run(2, rank)


def test_variables_are_restored_and_become_rank_0s() -> None:
    def rank(world: World) -> None:
        weights = [tf.Variable([1.0 + world.rank]), tf.Variable(world.rank)]
        state: Any = elastic.TensorFlowState(weights, batch=world.rank)
        weights[0].assign([9.0])
        state.batch = 9
        state.restore()
        assert (weights[0].numpy().tolist(), state.batch) == ([1.0 + world.rank], world.rank)
        state.sync()
        assert (weights[0].numpy().tolist(), int(weights[1]), state.batch) == ([1.0], 0, 0)
        weights[0].assign([5.0])
        state.commit()
        weights[0].assign([9.0])
        state.restore()
        assert weights[0].numpy().tolist() == [5.0]

    run(2, rank)


def test_a_model_with_its_optimizer() -> None:
    def rank(world: World) -> None:
        model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
        with pytest.raises(ValueError, match=r"call model\.build"):
            elastic.KerasState(model)
        model.build((None, 1))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.layers[0].kernel.assign([[float(world.rank)]])
        state: Any = elastic.KerasState(model, epoch=0)
        kernel, momentum = model.layers[0].kernel, model.optimizer.variables[2]
        assert momentum.shape == kernel.shape
        momentum.assign([[3.0]])
        state.restore()
        assert float(momentum.numpy()[0, 0]) == 0.0, "the optimizer was built, and is part of it"
        momentum.assign([[4.0 + world.rank]])
        state.sync()
        assert (float(kernel.numpy()[0, 0]), float(momentum.numpy()[0, 0])) == (0.0, 4.0)
        plain = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        elastic.TensorFlowKerasState(plain).restore()  # never compiled

    run(2, rank)


@pytest.mark.parametrize(
    ("updates", "skip_sync"),
    [
        ({1: HostUpdateResult.removed}, True),
        ({1: HostUpdateResult.added}, False),
        ({0: HostUpdateResult.removed, 1: HostUpdateResult.added}, False),
        ({0: HostUpdateResult.mixed}, False),
        ({0: HostUpdateResult.removed, 1: HostUpdateResult.removed}, True),
    ],
)
def test_hosts_that_one_rank_heard_of_interrupt_all(updates: dict[int, int], skip_sync: bool) -> None:
    def rank(world: World) -> None:
        state = objects(epoch=0)
        state.commit()
        state.epoch = 1
        if world.rank in updates:
            state.on_hosts_updated(10.0 + world.rank, updates[world.rank])
        with pytest.raises(HostsUpdatedInterrupt) as caught:
            state.commit()
        assert caught.value.skip_sync == skip_sync
        state.epoch = 2
        state.restore()
        assert state.epoch == 1, "it was saved before"
        state.on_hosts_updated(10.0, HostUpdateResult.added)  # told late of what all know
        state.commit()
        state.on_hosts_updated(20.0, HostUpdateResult.added)
        state.on_reset()  # forgets it
        state.commit()

    run(2, rank)


def test_all_ranks_go_back_when_one_fails() -> None:
    """The others wait in a collective, and learn of it by an error."""

    def rank(world: World) -> Any:
        state = objects(step=0)
        seen: list[int] = []
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(state.step)])

        @elastic.run
        def train(state: Any, last: int, *, name: str) -> str:
            while state.step < last:
                seen.append(state.step)
                if state.step == 2 and world.rank == 1 and not resets:
                    raise HorovodInternalError("lost")
                operations.allreduce(float(state.step))
                state.step += 1
                if state.step == 1:
                    state.commit()
            return name

        assert train.__name__ == "train"
        return train(state, 4, name="done"), seen, resets

    assert run(3, rank) == [("done", [0, 1, 2, 1, 2, 3], [1])] * 3


@pytest.mark.parametrize(("removed", "found"), [(True, [5, 6]), (False, [5, 5])])
def test_after_an_interrupt_nothing_is_restored(removed: bool, found: list[int]) -> None:
    """Where hosts were only removed every rank has what it had; else it takes what rank 0 kept last."""

    def rank(world: World) -> int:
        state = objects(step=0)

        @elastic.run
        def train(state: Any) -> int:
            if not state.step:
                state.step = 5 + world.rank
                state.save()
                raise HostsUpdatedInterrupt(skip_sync=removed)
            return int(state.step)

        return int(train(state))

    assert run(2, rank) == found


@pytest.mark.parametrize(
    "error", [CollectiveError("other"), ZeroDivisionError(), tf.errors.UnknownError(None, None, "x")]
)
def test_other_errors_are_the_script_s(error: Exception) -> None:
    def rank(world: World) -> int:
        calls = []

        @elastic.run
        def train(state: Any) -> None:
            calls.append(1)
            raise error

        with pytest.raises(type(error)) as caught:
            train(objects(step=0))
        assert caught.value is error
        return len(calls)

    assert run(1, rank) == [1]


def test_callbacks_commit_and_count() -> None:
    def rank(world: World) -> None:
        commits: list[int] = []

        class Counted(elastic.ObjectState):
            batch, epoch = 0, 0

            def save(self) -> None:
                commits.append(self.batch)
                super().save()

        state: Any = Counted(lambda obj: obj, lambda: 0, batch=0, epoch=3)
        commit = elastic.CommitStateCallback(state, batches_per_commit=2)
        batch, epoch = elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        data = tf.data.Dataset.from_tensor_slices((tf.ones([5, 1]), tf.ones([5, 1]))).batch(1)
        model.fit(data, epochs=2, verbose=0, callbacks=[batch, epoch, commit])
        assert commits == [1, 3, 0, 0, 2, 4, 0], "the second epoch goes on counting"
        assert state.epoch == 5

    run(1, rank)
