"""Every sample is seen exactly once an epoch, in an order that all ranks agree on."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.sharding import EpochOrder, EpochSeeds, hold_out, shard, share_count, shuffled
from mpitrain.errors import DataError

SIZES = [1, 2, 3, 7]


@pytest.mark.parametrize("size", SIZES)
def test_shares_are_each_element_once(size: int) -> None:
    shares = [list(shard(tf.data.Dataset.range(10), rank, size).as_numpy_iterator()) for rank in range(size)]
    assert sorted(chain(*shares)) == list(range(10))
    assert [len(share) for share in shares] == [share_count(10, rank, size) for rank in range(size)]
    assert shares[size - 1][0] == size - 1


def test_shard_refuses_a_rank_beyond_the_size() -> None:
    with pytest.raises(DataError, match="rank 2 cannot take a share among 2 ranks"):
        shard(tf.data.Dataset.range(4), 2, 2)


@pytest.mark.parametrize("size", SIZES)
def test_epochs_are_whole_and_differ(size: int) -> None:
    positions = np.arange(5, 28)
    orders = [EpochOrder(positions, 3, rank, size) for rank in range(size)]
    datasets = [order.dataset() for order in orders]
    epochs = [[list(dataset.as_numpy_iterator()) for dataset in datasets] for _ in range(3)]
    for epoch in epochs:
        assert sorted(chain(*epoch)) == positions.tolist()
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(dataset) for dataset in datasets] == [len(share) for share in epochs[0]]


def test_shares_of_all_sizes_are_cut_from_one_order() -> None:
    positions = np.arange(20)
    whole = EpochOrder(positions, 3).of_epoch(4)
    for rank in range(3):
        assert EpochOrder(positions, 3, rank, 3).of_epoch(4).tolist() == whole[rank::3].tolist()
    assert EpochOrder(positions, 4).of_epoch(4).tolist() != whole.tolist()


def test_order_does_not_depend_on_the_global_seed() -> None:
    def epochs(global_seed: int) -> list[list[int]]:
        tf.random.set_seed(global_seed)
        numbered = EpochOrder(np.arange(50), 1).dataset()
        stream = shuffled(tf.data.Dataset.range(50), 20, EpochSeeds(1))
        return [list(dataset.as_numpy_iterator()) for dataset in (numbered, stream, numbered, stream)]

    assert epochs(1) == epochs(2)


def test_streams_are_reshuffled_each_epoch() -> None:
    stream = shuffled(tf.data.Dataset.range(50), 50, EpochSeeds(1))
    first, second = (list(stream.as_numpy_iterator()) for _ in range(2))
    assert first != second
    assert first != sorted(first)
    assert sorted(first) == sorted(second) == list(range(50))
    assert list(shuffled(tf.data.Dataset.range(50), 50, EpochSeeds(2)).as_numpy_iterator()) != first


def test_resumes_at_an_epoch() -> None:
    order = EpochOrder(np.arange(9), 0)
    dataset = order.dataset()
    epochs = [list(dataset.as_numpy_iterator()) for _ in range(3)]
    order.epoch = 1
    assert list(dataset.as_numpy_iterator()) == epochs[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("size_after", SIZES)
def test_the_rest_of_an_epoch_continues_its_order(size: int, size_after: int) -> None:
    positions, batch, steps = np.arange(100, 153), 3, 2
    done = steps * batch * size
    before = [EpochOrder(positions, 3, rank, size).of_epoch(4)[: steps * batch] for rank in range(size)]
    after = [EpochOrder(positions, 3, rank, size_after, epoch=4, done=done) for rank in range(size_after)]
    rest = [list(order.dataset().as_numpy_iterator()) for order in after]
    whole = EpochOrder(positions, 3).of_epoch(4)
    assert sorted(chain(*before)) == sorted(whole[:done])
    assert [share for share in rest if share] == [
        whole[done + rank :: size_after].tolist() for rank in range(size_after) if len(whole[done + rank :: size_after])
    ]
    assert sorted([*chain(*before), *chain(*rest)]) == positions.tolist()


def test_repeat_goes_on_to_the_next_epochs() -> None:
    twice = list(EpochOrder(np.arange(9), 0).dataset().repeat(2).as_numpy_iterator())
    assert twice[:9] == EpochOrder(np.arange(9), 0).of_epoch(0).tolist()
    assert twice[9:] == EpochOrder(np.arange(9), 0).of_epoch(1).tolist()


def test_hold_out_depends_on_the_seed_alone() -> None:
    kept, held = hold_out(100, 0.2, 5)
    assert len(held) == 20
    assert sorted([*kept, *held]) == list(range(100))
    assert hold_out(100, 0.2, 5)[1].tolist() == held.tolist()
    assert hold_out(100, 0.2, 6)[1].tolist() != held.tolist()
    assert len(hold_out(100, 0.0, 5)[1]) == 0


@pytest.mark.parametrize(("fraction", "message"), [(1.0, "below 1"), (-0.1, "at least 0"), (0.9, "none of 3")])
def test_hold_out_refuses(fraction: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hold_out(3, fraction, 0)
