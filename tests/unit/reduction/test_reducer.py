"""The exact mean of gradients, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpitrain.comm.all_reduce import AllReduce
from mpitrain.errors import MismatchError, RankFinishedError
from mpitrain.reduction.buckets import BucketPlan, TensorSpec, plan_buckets
from mpitrain.reduction.reducer import Reducer, weights_of, zeros
from mpitrain.reduction.sparse import exchange_rows, merge_rows
from mpitrain.world.agreement import Agreed, Agreement
from tests import simulated

SIZES = (1, 2, 3, 4, 7)
Communicator = simulated.SimulatedCommunicator
BY_MPI = {"MPITRAIN_ALL_REDUCE": "mpi"}


def reducer(communicator: Communicator) -> Reducer:
    hosts = [f"host{rank}" for rank in range(communicator.size)]
    return Reducer(communicator, Agreement(communicator, hosts), AllReduce(communicator, "test", BY_MPI))


def update(own: Reducer, plan: BucketPlan, arrays: Sequence[Any], samples: float, **options: Any) -> list[Any]:
    """All buckets of one update; the means in the order of the plan's specs."""
    means: list[Any] = [None] * len(plan.specs)
    for index, bucket in enumerate(plan.buckets):
        members = [arrays[position] for position in bucket.members]
        given = list(members[0]) if bucket.sparse else members
        out = own.exchange(plan, index, given, samples, **options)
        for position, mean in zip(bucket.members, [tuple(out)] if bucket.sparse else out, strict=True):
            means[position] = mean
    return means


def agreed(samples: list[float], active: list[bool]) -> Agreed:
    return Agreed(np.array(samples), np.zeros((len(samples), 3)), np.zeros(len(samples)), np.array(active))


@pytest.mark.parametrize(
    ("samples", "active", "expected"),
    [
        ([8, 8], [True, True], [(None, 0.5), (None, 0.5)]),
        ([8, 24], [True, True], [(0.25, 1.0), (0.75, 1.0)]),
        ([8, 0], [True, False], [(1.0, 1.0), (0.0, 1.0)]),
        ([0, 0], [True, True], [(0.0, 1.0), (0.0, 1.0)]),
        ([5, 5, 0], [True, True, True], [(0.5, 1.0), (0.5, 1.0), (0.0, 1.0)]),
    ],
)
def test_weights(samples: list[float], active: list[bool], expected: list[tuple[float | None, float]]) -> None:
    found = [weights_of(agreed(samples, active), rank) for rank in range(len(samples))]
    assert [(w.before, w.after) for w in found] == expected


SPECS = [
    TensorSpec("a", (3, 2), "float32"),
    TensorSpec("b", (), "float64"),
    TensorSpec("c", (5,), "bfloat16"),
    TensorSpec("d", (0, 2), "float32"),
    TensorSpec("e", (4,), "float16"),
    TensorSpec("f", (2,), "complex64"),
    TensorSpec("g", (300_000,), "float32"),
]
DTYPES = {"bfloat16": ml_dtypes.bfloat16}
EPSILON = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-14}


def gradients(rank: int) -> list[Any]:
    random = np.random.default_rng(rank)
    return [random.standard_normal(s.shape).astype(DTYPES.get(s.dtype, s.dtype)) for s in SPECS]


def check_means(means: list[Any], weights: list[float]) -> None:
    for position, spec in enumerate(SPECS):
        wide = [np.asarray(gradients(rank)[position]).astype("complex128") for rank in range(len(weights))]
        expected = sum(w * g for w, g in zip(weights, wide, strict=True)) / sum(weights)
        mean = means[position]
        assert (mean.shape, mean.dtype.name) == (spec.shape, spec.dtype)
        np.testing.assert_allclose(mean.astype("complex128"), expected, rtol=0, atol=EPSILON.get(spec.dtype, 2e-6))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("samples", [lambda rank: 4.0, lambda rank: rank + 1.0, lambda rank: float(rank == 0)])
def test_mean_over_samples(size: int, samples: Callable[[int], float]) -> None:
    def body(communicator: Communicator) -> list[Any]:
        rank = communicator.rank
        own, given = reducer(communicator), gradients(rank)
        before = [g.copy() for g in given]
        for _ in range(3):  # memory is used again
            means = update(own, plan_buckets(SPECS), given, samples(rank))
        for array, copy in zip(given, before, strict=True):
            np.testing.assert_array_equal(array, copy)
        assert own.statistics.updates == 3
        assert own.statistics.samples_global == 3 * sum(map(samples, range(size)))
        return means

    results = simulated.run(size, body)
    check_means(results[0], [samples(rank) for rank in range(size)])
    for other in results[1:]:
        assert [m.tobytes() for m in other] == [m.tobytes() for m in results[0]]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_without_data_contribute_nothing(size: int) -> None:
    plan = plan_buckets(SPECS)

    def body(communicator: Communicator) -> list[Any]:
        own = reducer(communicator)
        if communicator.rank == 0:
            return update(own, plan, gradients(0), 3.0)
        own.contribute_nothing(own.agreement.idle())
        nothing: list[Any] = [None] * len(plan.specs)
        for bucket in plan.buckets:
            for position, array in zip(bucket.members, zeros(plan, bucket), strict=True):
                nothing[position] = array.astype(DTYPES.get(plan.specs[position].dtype, plan.specs[position].dtype))
        return update(own, plan, nothing, 0.0)

    results = simulated.run(size, body)
    check_means(results[-1], [1.0] + [0.0] * (size - 1))
    for other in results[1:]:
        assert [m.tobytes() for m in other] == [m.tobytes() for m in results[0]]


def test_ranks_that_cannot_take_part_are_not_waited_for() -> None:
    def body(communicator: Communicator) -> bool:
        own = reducer(communicator)
        if communicator.rank == 1:
            return not own.agreement.idle(finished=True, able=lambda call: None).possible
        with pytest.raises(RankFinishedError, match=r"rank 1 \(host1\) will not come"):
            update(own, plan_buckets(SPECS), gradients(0), 1.0)
        return True

    assert simulated.run(3, body) == [True] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_after_synchronizing_only_rank_0_counts(size: int) -> None:
    def body(communicator: Communicator) -> list[Any]:
        own = reducer(communicator)
        means = update(own, plan_buckets(SPECS), gradients(communicator.rank), 2.0, synchronize=lambda: True)
        again = update(own, plan_buckets(SPECS), gradients(communicator.rank), 2.0, synchronize=lambda: False)
        check_means(again, [1.0] * size)
        return means

    check_means(simulated.run(size, body)[-1], [1.0] + [0.0] * (size - 1))


def test_infinite_gradients_reach_all_ranks_even_where_others_weigh_nothing() -> None:
    def body(communicator: Communicator) -> Any:
        array = np.full(3, np.inf if communicator.rank == 1 else 1.0, np.float16)
        plan = plan_buckets([TensorSpec("a", (3,), "float16")])
        return update(reducer(communicator), plan, [array], 1.0 + communicator.rank)[0]

    assert all(np.isinf(mean).all() for mean in simulated.run(2, body))


def test_different_plans_raise_on_every_rank() -> None:
    def body(communicator: Communicator) -> str:
        title = "update by optimizer 0" if communicator.rank else "update by optimizer 1"
        with pytest.raises(MismatchError) as caught:
            update(reducer(communicator), plan_buckets(SPECS, title=title), gradients(0), 1.0)
        return str(caught.value)

    for text in simulated.run(3, body):
        assert "rank 0 (host0): update by optimizer 1 of 7 gradients" in text
        assert "ranks 1, 2 (host1, host2): update by optimizer 0 of 7 gradients" in text


def rows_of(rank: int, table: int) -> tuple[Any, Any]:
    """Rows of one rank, some twice; rank 1 has none."""
    random = np.random.default_rng(rank)
    count = 0 if rank == 1 else 6
    return random.standard_normal((count, 2, 3)), random.integers(0, min(table, 4), count)


def dense(rank: int, table: int) -> Any:
    values, indices = rows_of(rank, table)
    whole = np.zeros((table, 2, 3))
    np.add.at(whole, indices, values)
    return whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("table", [4, 1000], ids=["whole", "rows"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_sparse_mean(size: int, table: int, dtype: str) -> None:
    plan = plan_buckets([TensorSpec("table", (table, 2, 3), dtype, sparse=True)])

    def body(communicator: Communicator) -> tuple[Any, Any]:
        values, indices = rows_of(communicator.rank, table)
        samples = 1.0 + communicator.rank
        mean = update(reducer(communicator), plan, [(values.astype(dtype), indices)], samples)[0]
        return mean[0], mean[1]

    results = simulated.run(size, body)
    for values, indices in results:
        assert values.dtype.name == dtype
        assert indices.tolist() == sorted(set(indices.tolist()))
        assert values.tobytes() == results[0][0].tobytes()
    weights = [1.0 + rank for rank in range(size)]
    expected = sum(w * dense(rank, table) for rank, w in enumerate(weights)) / sum(weights)
    found = np.zeros((table, 2, 3))
    found[results[0][1]] = results[0][0]
    np.testing.assert_allclose(found, expected, atol={"float64": 1e-14, "float32": 1e-6, "float16": 5e-3}[dtype])
    if table == 1000:
        assert len(results[0][1]) <= 4


def test_no_rank_has_rows() -> None:
    def body(communicator: Communicator) -> tuple[int, int]:
        nothing = np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
        out = exchange_rows(communicator, AllReduce(communicator, "test", BY_MPI), *nothing, rows=9, factor=0.5)
        return len(out[0]), len(out[1])

    assert simulated.run(2, body) == [(0, 0)] * 2


def test_merge_rows() -> None:
    values, indices = merge_rows(np.array([[1.0], [2.0], [4.0], [8.0]]), np.array([5, 2, 5, 0]))
    assert (values[:, 0].tolist(), indices.tolist()) == ([8.0, 2.0, 5.0], [0, 2, 5])


def test_an_update_that_another_one_interrupts_is_refused() -> None:
    def body(communicator: Communicator) -> list[float]:
        own = reducer(communicator)
        plan = plan_buckets([TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float64")])
        arrays = [np.ones(2, "float32"), np.ones(2) * communicator.rank]
        own.exchange(plan, 0, [arrays[1]], 1.0)
        for index in (0, 1):  # the other update's first bucket, and what is left of this one
            with pytest.raises(MismatchError, match="another update of this rank is not finished"):
                own.exchange(plan, index, [arrays[1 - index]], 1.0)
        return [float(mean[0]) for mean in update(own, plan, arrays, 1.0)]

    assert simulated.run(2, body) == [[1.0, 0.5]] * 2
