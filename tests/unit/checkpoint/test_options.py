"""When checkpoints are due, and where a run goes on. No TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint import resume as checkpoint_resumption
from mpitrain.checkpoint.files import ARRAYS, Snapshot
from mpitrain.checkpoint.options import CheckpointOptions, Dealt, Position
from mpitrain.checkpoint.resume import Resumption, position_among, resumption
from mpitrain.checkpoint.store import Store
from mpitrain.errors import AgreedError, UsageError
from mpitrain.runtime.marks import Reporter
from tests import simulated

HERE = Path("checkpoints")


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        ("epoch", None, None),
        ("1step", 1, None),
        ("500steps", 500, None),
        ("500 steps", 500, None),
        ("30s", None, 30.0),
        ("10min", None, 600.0),
        ("2h", None, 7200.0),
    ],
)
def test_every(every: str, steps: int | None, seconds: float | None) -> None:
    options = CheckpointOptions(HERE, every)
    assert (options.every_steps, options.every_seconds) == (steps, seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "0steps"}, "every is '0steps': write it epoch, or as in 500steps or 10min"),
        ({"every": "often"}, "every is 'often': write it epoch"),
        ({"keep": 0}, "keep is 0: it must be at least 1"),
        ({"grace_seconds": 0.0}, "grace_seconds is 0.0: it must be above 0"),
        ({"grace_seconds": float("nan")}, "grace_seconds is nan: give a finite number"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointOptions(HERE, **options)


def resumed(position: Position, ranks: int, order: dict[str, int] | None) -> Resumption:
    return Resumption("c/checkpoint-000001", {}, {"position": position.as_info(), "ranks": ranks, "order": order})


ORDER = {"samples": 1000, "seed": 3}
# What every run remembers.
INFO: dict[str, Any] = {
    "position": Position().as_info(),
    "ranks": 2,
    "order": None,
    "stopped": False,
    "history": {},
    "counters": [],
    "names": {},
    "learning rate": None,
    "all_reduce": None,
}


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8), st.integers(1, 16), st.integers(1, 16))
def test_dealt_samples_go_on_where_they_were(step: int, before: int, after: int, batch: int, batch_after: int) -> None:
    samples = min(step * before * batch, 1000)
    position = Position(2, step, samples, 77)
    found = position_among(resumed(position, before, ORDER), Dealt(1000, after * batch_after, 3), after, pytest.fail)
    assert (found.epoch, found.samples, found.steps) == (2, samples, 77)
    assert found.step == samples // (after * batch_after)


@pytest.mark.parametrize("dealt", [Dealt(999, 10, 3), Dealt(1000, 10, 4)])
def test_another_order_is_refused_in_mid_epoch_only(dealt: Dealt) -> None:
    with pytest.raises(UsageError, match="in the middle of an epoch of 1,000 samples with seed 3, but now there are"):
        position_among(resumed(Position(1, 5, 50), 2, ORDER), dealt, 2, pytest.fail)
    assert position_among(resumed(Position(1), 2, ORDER), dealt, 2, pytest.fail) == Position(1)


@pytest.mark.parametrize(("ranks", "step", "left"), [(2, 6, 0), (4, 3, 0), (1, 12, 0), (5, 2, 2)])
def test_without_an_order_the_same_share_is_passed_over(ranks: int, step: int, left: int) -> None:
    said: list[str] = []
    found = position_among(resumed(Position(1, 6, 0, 20), 2, None), None, ranks, said.append)
    assert found == Position(1, step, 0, 20)
    assert [f"it sees up to {left} batches of this epoch twice" in text for text in said] == [True] * bool(left)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_what_rank_0_chose(tmp_path: Path, size: int) -> None:
    store = Store(tmp_path)
    for number in range(3):
        arrays = {"x": np.full((2, 3), number, np.float32), "n": np.asarray(number), "none": np.empty(0)}
        store.write(Snapshot(arrays, {**INFO, "number": number}))
    (store.paths()[2] / ARRAYS).unlink()

    def body(communicator: simulated.SimulatedCommunicator) -> tuple[Any, ...]:
        # Other ranks may not see the directory.
        own = store if communicator.rank == 0 else Store(Path("/nowhere"))
        newest = resumption(CheckpointOptions(own.directory), own, communicator)
        never = resumption(CheckpointOptions(own.directory, resume="never"), own, communicator)
        first = resumption(CheckpointOptions(own.directory, resume=str(store.paths()[0])), own, communicator)
        with pytest.raises(AgreedError, match="cannot be resumed from"):
            resumption(CheckpointOptions(own.directory, resume=str(tmp_path / "none")), own, communicator)
        assert newest is not None
        assert first is not None
        assert newest.arrays["x"].tolist() == [[1.0] * 3] * 2
        assert (int(newest.arrays["n"]), newest.arrays["none"].size) == (1, 0)
        return newest.info["number"], never, first.info["number"]

    assert simulated.run(size, body) == [(1, None, 0)] * size


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert simulated.run(2, lambda c: resumption(CheckpointOptions(store.directory), store, c)) == [None, None]


def test_a_job_that_is_started_again_goes_on_whatever_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teller = Reporter("secret", 2)
    monkeypatch.setattr(checkpoint_resumption, "reporter", lambda: teller)
    store = Store(tmp_path / "c")
    options = CheckpointOptions(store.directory, resume="never")

    def look() -> list[str | None]:
        found = simulated.run(2, lambda c: resumption(options, store, c))
        return [None if one is None else one.source for one in found]

    assert look() == [None, None]
    assert capsys.readouterr().err == ""
    teller.resumes = True
    assert look() == [None, None]
    assert capsys.readouterr().err.count("THE CHECKPOINTS of the attempts before are not in") == 1
    written = str(store.write(Snapshot({"x": np.zeros(3)}, INFO)))
    assert look() == [written, written]
    teller.resumes = False
    assert look() == [None, None]
