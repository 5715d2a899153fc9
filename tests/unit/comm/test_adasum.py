"""Adasum against its definition on whole vectors."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.comm import adasum
from tests import simulated


def own(rank: int, elements: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=elements).astype(dtype)


def defined(vectors: list[np.ndarray]) -> np.ndarray:
    """Pairs, then pairs of pairs."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [(1 - a @ b / (2 * (a @ a))) * a + (1 - a @ b / (2 * (b @ b))) * b for a, b in pairs]
    return vectors[0]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("elements", [1, 5, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-2), ("float32", 1e-5), ("float64", 1e-12)])
def test_definition(size: int, elements: int, dtype: str, tolerance: float) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> np.ndarray:
        buffer = own(communicator.rank, elements, dtype)
        adasum.all_reduce(communicator, buffer)
        return buffer

    results = simulated.run(size, body)
    expected = defined([own(rank, elements, dtype).astype(np.float64) for rank in range(size)])
    for result in results:
        np.testing.assert_array_equal(result, results[0])
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], [1.0, 2.0]),  # equal: their mean
        ([[1.0, 0.0], [0.0, 3.0]], [1.0, 3.0]),  # orthogonal: their sum
        ([[0.0, 0.0], [5.0, 6.0]], [5.0, 6.0]),  # nothing: the other
        ([[], []], []),
    ],
)
def test_what_is_known_without_arithmetic(vectors: list[list[float]], expected: list[float]) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> list[float]:
        buffer = np.array(vectors[communicator.rank])
        adasum.all_reduce(communicator, buffer)
        return [float(value) for value in buffer]

    assert simulated.run(2, body) == [expected, expected]


def test_a_number_of_ranks_that_is_no_power_of_two_is_refused() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> None:
        with pytest.raises(ValueError, match="power of two, not 3"):
            adasum.all_reduce(communicator, np.ones(3))

    simulated.run(3, body)
