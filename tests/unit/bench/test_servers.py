"""Parameter servers beside all-reduce."""

from __future__ import annotations

import pytest

from mpitrain.bench import servers
from mpitrain.bench.server_strategy import NAME
from mpitrain.errors import AgreedError
from tests.unit.job import run


def test_too_few_ranks_are_told() -> None:
    with pytest.raises(AgreedError, match="with 2 servers needs 3 ranks or more: mpirun -np 4"):
        run(1, lambda world: next(servers.measure(world, [1.0], [1, 2], 1)))
    with pytest.raises(AgreedError, match="needs four ranks or more"):
        run(1, lambda world: next(servers.measure_straggler(world, servers.Straggler(), 1)))


def test_figures() -> None:
    raw = {"servers_seconds": (0.004, 0.002, 0.003), "all_reduce_seconds": (0.001,)}
    expected = {"servers ms": 3.0, "all-reduce ms": 1.0, "servers / all-reduce": 3.0}
    assert servers._figures(raw) == pytest.approx(expected)
    beside = servers._figures({**raw, "strategy_seconds": (0.006,)})
    assert beside == pytest.approx({**expected, f"{NAME} ms": 6.0, f"{NAME} / servers": 2.0})
