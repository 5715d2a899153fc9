"""When servers update, with whose gradients, and whom they answer; and what travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.strategies.parameter_server.averages import clip_factors, mean, mean_rows
from mpitrain.strategies.parameter_server.messages import COLUMNS, Answer, Kind, Message, Status
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.strategies.parameter_server.policies import LOST, AsyncPolicy, Push, SyncPolicy, stalest

PARTS = (0, 2)


@dataclass
class Recorder:
    """What the policy asks for, as lines."""

    lines: list[str] = field(default_factory=list)

    def update(self, part: int, pushes: Sequence[Push], learning_rate: float, divisor: float) -> None:
        assert all(push.content[part] is not None for push in pushes)
        names = ",".join(f"{push.worker}" for push in pushes)
        self.lines.append(f"update {part} of {names} / {divisor:g}")

    def update_all(self, pushes: Sequence[Push], learning_rate: float) -> None:
        assert all(set(push.content) == set(PARTS) for push in pushes)
        self.lines.append(f"update all of {','.join(str(push.worker) for push in pushes)}")

    def answer(self, worker: int, part: int, dropped: bool) -> None:
        self.lines.append(f"{'drop' if dropped else 'answer'} {worker}.{part}")

    def taken(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def message(part: int, version: int = 0, samples: float = 1.0) -> Message:
    return Message(Kind.PUSH, part=part, version=version, samples=samples)


def whole(policy: SyncPolicy | AsyncPolicy, worker: int, version: int, samples: float = 1.0) -> None:
    for part in PARTS:
        policy.came(worker, message(part, version, samples), "gradient")


def test_sync_updates_each_part_as_soon_as_all_have_sent_it() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 2, 0, whole=False)
    policy.came(1, message(0), "x")
    policy.came(1, message(2), "x")
    assert host.taken() == []
    policy.came(0, message(0), "x")
    assert host.taken() == ["update 0 of 0,1 / 1", "answer 0.0", "answer 1.0"]
    assert policy.version == 0
    policy.came(0, message(2), "x")
    assert host.taken() == ["update 2 of 0,1 / 1", "answer 0.2", "answer 1.2"]
    assert policy.version == 1
    assert policy.counts.samples == 2


def test_sync_does_not_wait_for_workers_without_data() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 3, 0, whole=False)
    whole(policy, 0, 0)
    whole(policy, 2, 0)
    assert host.taken() == []
    policy.active.discard(1)
    policy.look()
    assert host.taken()[0] == "update 0 of 0,2 / 1"
    assert policy.version == 1


def test_sync_with_norms_waits_for_all_parts() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 2, 0, whole=True)
    whole(policy, 0, 0)
    policy.came(1, message(0), "x")
    assert host.taken() == []
    policy.came(1, message(2), "x")
    assert host.taken() == ["update all of 0,1", "answer 0.0", "answer 0.2", "answer 1.0", "answer 1.2"]


def test_backup_workers_drop_the_last() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 3, 1, whole=False)
    whole(policy, 2, 0)
    policy.came(1, message(0), "x")  # the slow one has begun
    whole(policy, 0, 0)
    assert host.taken() == ["update all of 0,2", "answer 0.0", "answer 0.2", "answer 2.0", "answer 2.2"]
    policy.came(1, message(2), "x")
    assert host.taken() == ["drop 1.0", "drop 1.2"]
    assert policy.counts.dropped == {1: 1}
    whole(policy, 1, 1)  # now in time
    whole(policy, 0, 1)
    assert host.taken()[0] == "update all of 0,1"


def test_a_worker_that_came_at_the_same_time_as_the_last_is_dropped_too() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 4, 2, whole=False)
    policy.active.discard(3)  # so one gradient is enough
    whole(policy, 1, 0)
    assert host.taken()[0] == "update all of 1"
    whole(policy, 0, 0)
    assert host.taken() == ["drop 0.0", "drop 0.2"]


def test_async_applies_each_when_it_comes() -> None:
    host = Recorder()
    policy = AsyncPolicy(host, PARTS, 2, ServerOptions(mode="async"))
    policy.came(0, message(0), "x")
    assert host.taken() == ["update 0 of 0 / 1", "answer 0.0"]
    whole(policy, 1, 0)
    policy.came(0, message(2), "x")
    assert policy.version == 2
    whole(policy, 0, 0)
    assert policy.counts.staleness == {0: 2, 2: 1}


def test_async_scale_and_drop() -> None:
    host = Recorder()
    policy = AsyncPolicy(host, PARTS, 2, ServerOptions(mode="async", stale="scale"))
    for _ in range(3):
        whole(policy, 0, policy.version)
    host.taken()
    whole(policy, 1, 0)
    assert host.taken()[0] == "update 0 of 1 / 3"
    policy = AsyncPolicy(host, PARTS, 2, ServerOptions(mode="async", stale="drop"))
    for _ in range(3):
        whole(policy, 0, policy.version)
    host.taken()
    whole(policy, 1, 0)  # 3 updates of one other worker: more than twice as slow as that
    assert host.taken() == ["drop 1.0", "drop 1.2"]
    assert (policy.version, policy.counts.dropped) == (3, {1: 1})
    assert stalest(None, 2) == 2
    assert stalest(3, 4) == 12


def test_async_holds_back_who_is_too_far_ahead() -> None:
    host = Recorder()
    policy = AsyncPolicy(host, PARTS, 2, ServerOptions(mode="async", max_staleness=1))
    whole(policy, 0, 0)
    host.taken()
    whole(policy, 0, 1)
    assert "answer 0.2" not in host.taken()
    assert policy.version == 2  # applied it is
    whole(policy, 1, 0)
    assert sorted(host.taken()[-3:]) == ["answer 0.2", "answer 1.2", "update 2 of 1 / 1"]
    whole(policy, 0, 3)
    assert [line for line in host.taken() if line.startswith("answer")] == ["answer 0.0"]
    policy.active.discard(1)  # it has no data left
    policy.look()
    assert host.taken() == ["answer 0.2"]
    policy.released()
    whole(policy, 1, 4)
    assert "answer 1.2" in host.taken()


def test_a_gradient_without_samples_is_only_a_question() -> None:
    host = Recorder()
    policy = AsyncPolicy(host, PARTS, 2, ServerOptions(mode="async"))
    whole(policy, 1, 0, samples=0.0)
    assert host.taken() == ["answer 1.0", "answer 1.2"]
    assert (policy.version, policy.counts.staleness) == (0, {})
    assert (policy.done, policy.counts.dropped) == ({1: 1}, {1: 1})


def test_a_gradient_without_samples_is_none_of_those_that_make_a_step() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 2, 1, whole=False)
    whole(policy, 1, 0, samples=0.0)
    assert host.taken() == ["drop 1.0", "drop 1.2"]
    assert (policy.version, policy.done, policy.counts.dropped) == (0, {1: 1}, {1: 1})
    whole(policy, 0, 0)
    assert host.taken()[0] == "update all of 0"


def test_messages_survive_their_way() -> None:
    one = Message(Kind.PUSH, 3, 4, 5, 6.5, 0.1, 7, 1 << 40, 8, (1.0, 2.0, 3.0))
    assert Message.unpack(one.pack()) == one
    assert math.isnan(Message.unpack(Message(Kind.STOP).pack()).learning_rate)
    workers = np.arange(2.0 * COLUMNS).reshape(2, COLUMNS)
    two = Answer(Status.DROPPED, 1, 2, 3, 4, 5, 6.0, 7, workers)
    words = two.pack()
    assert len(words) == Answer.words(2)
    found = Answer.unpack(words)
    assert (found.status, found.iterations, found.position) == (Status.DROPPED, 4, 7)
    np.testing.assert_array_equal(found.workers, workers)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 100))
def test_means_weigh_by_samples(samples: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=6) for _ in samples]
    expected = np.average(arrays, axis=0, weights=samples) if sum(samples) else np.zeros(6)
    np.testing.assert_allclose(mean([a.copy() for a in arrays], samples, "float64"), expected, atol=1e-12)
    table = np.zeros((9, 2))
    rows = []
    for count in samples:
        indices = random.integers(0, 9, 4)
        values = random.normal(size=(4, 2))
        weight = count / sum(samples) if sum(samples) else 0.0
        np.add.at(table, indices, values * weight)
        rows.append((values, indices))
    values, indices = mean_rows(rows, samples, "float64")
    assert (np.diff(indices) > 0).all()
    np.testing.assert_allclose(values, table[indices], atol=1e-12)


def test_factors_of_clipping() -> None:
    sums = np.array([4.0, 0.0, 0.25])
    np.testing.assert_allclose(clip_factors(sums, 1.0, None), [0.5, 1.0, 1.0])
    np.testing.assert_allclose(clip_factors(sums, None, 0.5), np.full(3, 0.5 / np.sqrt(4.25)))
    np.testing.assert_allclose(clip_factors(sums, None, None), np.ones(3))
    assert np.isnan(clip_factors(np.array([np.inf]), None, 1.0)).all()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_half_precision_does_not_overflow(workers: int) -> None:
    from mpitrain.strategies.parameter_server.arrays import rounded

    array = np.array([1e30, -1e30, 1.0] * workers, np.float32)
    found = rounded(array, np.dtype(np.float16))
    assert np.isfinite(found).all()
    assert rounded(array, np.dtype(np.float32)) is array


def test_async_with_whole_updates_applies_nothing_of_a_gradient_that_is_cut_off() -> None:
    host = Recorder()
    policy = AsyncPolicy(host, PARTS, 3, ServerOptions(mode="async", max_staleness=0, whole_updates=True))
    policy.came(1, message(0), "x")
    assert host.taken() == []
    whole(policy, 0, 0)
    assert host.taken() == ["update 0 of 0 / 1", "update 2 of 0 / 1"]  # and waits for the others
    policy.counts.dropped.update({0: 1, 1: 2, 2: 3})
    assert policy.done == {0: 1}
    policy.on_shrink([0, 2])  # worker 1 is lost, and 2 is 1 from now on
    assert (policy.active, policy.done, policy.version) == ({0, 1}, {}, 1)
    assert policy.counts.dropped == {0: 1, 1: 3, LOST: 2}
    whole(policy, 0, 1)
    assert host.taken() == ["update 0 of 0 / 1", "update 2 of 0 / 1"]
    whole(policy, 1, 1)
    assert host.taken()[2:] == ["answer 0.0", "answer 0.2", "answer 1.0", "answer 1.2"]


def test_backup_workers_are_counted_from_those_that_are_left() -> None:
    host = Recorder()
    policy = SyncPolicy(host, PARTS, 3, 1, whole=True)
    whole(policy, 2, 0)
    policy.came(1, message(0), "x")
    policy.on_shrink([0, 2])
    assert (policy.active, policy.done) == ({0, 1}, {})
    whole(policy, 1, 0)
    assert host.taken() == ["update all of 1", "answer 1.0", "answer 1.2"]
    whole(policy, 0, 0)
    assert host.taken() == ["drop 0.0", "drop 0.2"]
    assert (policy.done, policy.counts.dropped) == ({0: 1, 1: 1}, {0: 1})
