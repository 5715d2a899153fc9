"""The job as Horovod describes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.horovod import basics
from mpitrain.horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from mpitrain.world.world import World
from tests.unit.horovod.job import run


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5).map(sorted))
def test_places_of_ranks(hosts: list[str]) -> None:
    """A rank and those of its local rank, one on each host that has so many, are one column."""

    def rank(world: World) -> tuple[int, ...]:
        asked = (basics.local_rank, basics.local_size, basics.cross_rank, basics.cross_size)
        assert [int(op()) for op in (basics.local_rank_op, basics.local_size_op)] == [one() for one in asked[:2]]
        assert int(basics.rank_op()) == basics.rank() == world.rank
        assert basics.is_homogeneous() == (len({hosts.count(host) for host in hosts}) == 1)
        return tuple(one() for one in asked)

    found = run(len(hosts), rank, hosts)
    for number, (local, of_host, cross, across) in enumerate(found):
        assert (local, of_host) == (hosts[:number].count(hosts[number]), hosts.count(hosts[number]))
        column = [other for other, (place, *_) in enumerate(found) if place == local]
        assert (cross, across) == (column.index(number), len(column))


def test_before_init() -> None:
    for asked in (basics.rank, basics.size, basics.stop_timeline, basics.mpi_threads_supported):
        with pytest.raises(ValueError, match="Horovod has not been initialized"):
            asked()
    with pytest.raises(tf.errors.InvalidArgumentError, match="has not been initialized"):
        basics.rank_op()


class Loader(BaseDataLoader):
    """Batches 0, 1, 2, ..., of which one cannot be made."""

    def __init__(self, count: int, broken: int = -1) -> None:
        self.count, self.broken = count, broken
        self.made: list[int] = []

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.broken:
                raise ZeroDivisionError("broken")
            self.made.append(number)
            yield number

    def _process_batch(self, batch: int) -> tuple[int, bool]:
        return 10 * batch, threading.current_thread() is threading.main_thread()


class Ahead(AsyncDataLoaderMixin, Loader):
    """The same, ahead."""


@pytest.mark.parametrize("ahead", [0, 1, 64])
def test_batches_made_ahead(ahead: int) -> None:
    loader = Ahead(ahead, 5)
    expected = [(10 * number, True) for number in range(5)]
    assert list(Loader(5)) == expected
    assert [list(loader) for _ in range(2)] == [expected] * 2, "a second loop begins anew"
    broken = iter(Ahead(ahead, 5, broken=2))
    assert [next(broken) for _ in range(2)] == expected[:2]
    with pytest.raises(ZeroDivisionError, match="broken"):
        next(broken)


def test_no_more_is_made_ahead_than_asked_for() -> None:
    loader = Ahead(2, 100)
    batches = iter(loader)
    assert next(batches) == (0, True)
    loader.close_async_loader()  # and waits for who makes them
    assert not loader._thread.is_alive()
    assert len(loader.made) <= 4, "one was taken, two wait, and one was being handed over"
    assert next(iter(loader)) == (0, True)
    loader.close_async_loader()
