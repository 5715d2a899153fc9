"""Gradients that are not finite are traced to the rank and the variable they come from."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.comm.all_reduce import AllReduce
from mpitrain.errors import NonFiniteError
from mpitrain.reduction import finite
from mpitrain.reduction.buckets import BucketPlan, TensorSpec, plan_buckets
from mpitrain.reduction.reducer import Reducer
from mpitrain.runtime import streams
from mpitrain.world.agreement import Agreement
from tests import simulated
from tests.simulated import SimulatedCommunicator

SPECS = [TensorSpec("a/kernel", (5, 3), "float32"), TensorSpec("a/bias", (3,), "float32")]
LARGE = [TensorSpec("b/kernel", (1000, 400), "float32")]
SPARSE = [TensorSpec("c/rows", (50, 2), "float32", sparse=True)]


def exchange(
    communicator: SimulatedCommunicator, plan: BucketPlan, action: str, bad: dict[tuple[int, str], float], updates: int
) -> list[str]:
    """Makes updates; what was raised, for each."""
    reducer = Reducer(
        communicator,
        Agreement(communicator, ["h"] * communicator.size),
        AllReduce(communicator, "", {"MPITRAIN_ALL_REDUCE": "mpi"}),
    )
    reducer.finite.action = action

    def update() -> None:
        for index, bucket in enumerate(plan.buckets):
            arrays = [np.ones(plan.specs[p].shape if not bucket.sparse else (2, 2), "f") for p in bucket.members]
            for position, array in zip(bucket.members, arrays, strict=True):
                value = bad.get((communicator.rank, plan.specs[position].name))
                if value is not None:
                    array.reshape(-1)[-1] = value
            if bucket.sparse:
                arrays.append(np.array([1, communicator.rank + 2]))
            reducer.exchange(plan, index, arrays, 1.0)

    def attempt() -> str:
        try:
            update()
        except NonFiniteError as error:
            return str(error)
        return ""

    return [attempt() for _ in range(updates)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("specs", "bad", "words"),
    [
        (SPECS, {}, ""),
        (SPECS, {(1, "a/bias"): np.nan}, "first in a/bias on rank 1 (h) (1 NaN, 0 infinite values). "),
        (SPECS, {(0, "a/kernel"): np.inf}, "first in a/kernel on rank 0 (h) (0 NaN, 1 infinite value). "),
        (SPECS, {(0, "a/kernel"): 3e38, (1, "a/kernel"): 3e38}, "each rank's own is finite"),
        (SPARSE, {(1, "c/rows"): np.nan}, "first in c/rows on rank 1 (h) (1 NaN, 0 infinite values). "),
    ],
    ids=["finite", "nan", "inf", "sum too large", "sparse"],
)
def test_stop(size: int, specs: list[TensorSpec], bad: dict[tuple[int, str], float], words: str) -> None:
    plan = plan_buckets(specs)
    for (raised,) in simulated.run(size, lambda c: exchange(c, plan, "stop", bad, 1)):
        assert (words in raised and "in update 1 (" in raised) if words else raised == ""


def test_values_deep_in_a_large_tensor_are_found_at_the_next_whole_look() -> None:
    plan = plan_buckets(LARGE)
    assert finite.LOOKED_AT_BYTES < 1000 * 400 * 4
    found = simulated.run(2, lambda c: exchange(c, plan, "stop", {(1, "b/kernel"): np.nan}, finite.WHOLE_EVERY))
    for raised in found:
        assert raised[:-1] == [""] * (finite.WHOLE_EVERY - 1)
        assert "b/kernel on rank 1" in raised[-1]


@pytest.mark.parametrize(("action", "count"), [("warn", 1), ("ignore", 0)])
def test_going_on(action: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(streams, "write_stderr", told.append)
    plan = plan_buckets(SPECS)
    assert simulated.run(2, lambda c: exchange(c, plan, action, {(1, "a/bias"): np.nan}, 3)) == [["", "", ""]] * 2
    assert len(told) == count


def test_gradients_that_are_scaled_until_they_overflow_are_let_pass() -> None:
    plan = plan_buckets(SPECS)

    def run(communicator: SimulatedCommunicator) -> bool:
        check = finite.FiniteCheck(communicator, Agreement(communicator, ["h"] * 2))
        check.action = "stop"
        check.may_overflow.add(plan.call.owner)
        with np.errstate(invalid="ignore"):
            check.look(plan, plan.buckets[0], np.full(18, np.inf, "f"), [], 1)
        return True

    assert simulated.run(2, run) == [True, True]
