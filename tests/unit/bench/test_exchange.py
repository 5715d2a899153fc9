"""What is exchanged by the benchmark, and how fast it could be."""

from __future__ import annotations

import pytest

from mpitrain.bench.exchange import limit_seconds, split


@pytest.mark.parametrize(("elements", "count"), [(10, 1), (10, 3), (65536, 200), (2, 5)])
def test_gradients_are_of_equal_size(elements: int, count: int) -> None:
    sizes = split(elements, count)
    assert len(sizes) == count
    assert sum(sizes) == max(elements, count)
    assert max(sizes) - min(sizes) <= 1


def test_limit_of_the_link() -> None:
    assert limit_seconds(2, 10**9 // 8, 1e9) == pytest.approx(1.0)
    assert limit_seconds(4, 10**9 // 8, 1e9) == pytest.approx(1.5)
