"""What servers counted, in one line."""

from __future__ import annotations

from types import SimpleNamespace

from mpitrain.strategies.parameter_server.counts import ServerCounts, histogram, server_counts
from tests.unit.job import run


def test_one_line() -> None:
    assert ServerCounts(1, 0, {}).text() == "1 update"
    assert ServerCounts(1200, 2, {}).text() == "1,200 updates, 2 gradients dropped"
    counts = ServerCounts(4, 0, {0: 1, 2: 3})
    assert counts.text() == "4 updates, staleness 0: 25%, 2: 75% (mean 1.50)"


def test_what_is_rare_is_added_up() -> None:
    assert histogram(dict.fromkeys(range(8), 10) | {20: 15, 30: 5}) == (
        "0: 10%, 1: 10%, 2: 10%, 3: 10%, 4: 10%, 5: 10%, 6: 10%, 7: 10%, 8+: 20%"
    )


def test_where_gradients_are_averaged_there_is_nothing_to_count() -> None:
    model = SimpleNamespace(optimizer=SimpleNamespace())
    assert run(2, lambda world: server_counts(model, world)) == [None, None]
