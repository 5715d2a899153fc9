"""The ring, on simulated ranks: right sums, same bits, any size, any setting."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.comm.ring import Ring, RingSetting
from tests import simulated

SIZES = (1, 2, 3, 4, 7)


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    random = np.random.default_rng(100 + rank)
    if np.dtype(dtype).kind in "iu":
        return random.integers(0, 20, count).astype(dtype)
    return random.standard_normal(count).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 64, 1000])
@pytest.mark.parametrize("setting", [RingSetting(16, 1), RingSetting(64, 3), RingSetting(1 << 20, 4)])
def test_sum_of_all_ranks(size: int, count: int, setting: RingSetting) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> np.ndarray:
        source = values(communicator.rank, count, "float64")
        before = source.copy()
        target = np.full(count, np.nan)
        Ring(communicator).all_reduce(source, target, setting)
        np.testing.assert_array_equal(source, before)
        return target

    results = simulated.run(size, body)
    expected = sum(values(rank, count, "float64") for rank in range(size))
    np.testing.assert_allclose(results[0], expected, rtol=1e-13, atol=1e-13)
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "complex64"])
def test_in_place_and_dtypes(size: int, dtype: str) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> np.ndarray:
        array = values(communicator.rank, 101, dtype)
        Ring(communicator).all_reduce(array, array, RingSetting(32, 2))
        return array

    results = simulated.run(size, body)
    expected = sum(values(rank, 101, dtype).astype("complex128") for rank in range(size))
    np.testing.assert_allclose(results[-1].astype("complex128"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_scale_is_applied_once(size: int) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> np.ndarray:
        array = values(communicator.rank, 50, "float64")
        target = np.empty_like(array)
        Ring(communicator).all_reduce(array, target, RingSetting(32, 2), scale=1 / size)
        return target

    expected = np.mean([values(rank, 50, "float64") for rank in range(size)], axis=0)
    for result in simulated.run(size, body):
        np.testing.assert_allclose(result, expected, rtol=1e-13)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_segments_and_window_do_not_change_bits(size: int) -> None:
    def run(setting: RingSetting) -> bytes:
        def body(communicator: simulated.SimulatedCommunicator) -> bytes:
            array = values(communicator.rank, 999, "float32")
            Ring(communicator).all_reduce(array, array, setting)
            return array.tobytes()

        return simulated.run(size, body)[0]

    assert run(RingSetting(16, 1)) == run(RingSetting(64, 5)) == run(RingSetting(1 << 16, 2))
