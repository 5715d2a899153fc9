"""Which engine is used where the caller names none."""

from __future__ import annotations

import pytest

from mpitrain.collectives.host_engine import HostEngine
from mpitrain.collectives.registry import chosen, engine_of
from mpitrain.errors import UsageError
from mpitrain.world import engine_choice
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.mark.parametrize(
    ("asked", "ranks", "expected"),
    [
        ("python", 1, ("host", "there is one rank")),
        ("python", 2, ("host", "MPITRAIN_ENGINE=python")),
        ("native", 2, ("native", "MPITRAIN_ENGINE=native")),
    ],
)
def test_what_is_asked_for_is_used(
    asked: str, ranks: int, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(engine_choice.VARIABLE, asked)
    assert run(ranks, chosen) == [expected] * ranks


def test_ranks_that_are_threads_have_no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_choice.VARIABLE, raising=False)

    def rank(world: World) -> tuple[str, bool]:
        engine = engine_of(world)
        return chosen(world)[0], isinstance(engine, HostEngine) and engine is engine_of(world, "host")

    assert run(2, rank) == [("host", True)] * 2


def test_an_unknown_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_choice.VARIABLE, "fast")
    with pytest.raises(UsageError, match="fast"):
        run(2, chosen)
