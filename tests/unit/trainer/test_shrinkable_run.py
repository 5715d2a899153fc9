"""What is told of ranks that were lost, once the others have made the next step."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.faults.activity import Activity
from mpitrain.runtime import streams
from mpitrain.trainer.shrinkable_run import LostRanks, ShrinkableRun


@pytest.mark.parametrize("is_root", [True, False])
def test_losses_of_one_step_are_all_told_by_who_is_the_root_then(
    is_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(streams, "write_stderr", told.append)
    world: Any = SimpleNamespace(activity=Activity(), is_root=False)
    source: Any = SimpleNamespace()
    run = ShrinkableRun(world, None, source, 1)
    every: Any = SimpleNamespace(after_step=None)
    run.every = every

    def step() -> None:
        every.after_step()

    run._note(LostRanks((0,), ("hosta",), 3, 1, 10, 0.0), time.monotonic() - 5)
    world.is_root = is_root  # the rank that was before this one dies, too
    run._note(LostRanks((1,), ("hosta",), 2, 1, 10, 0.0), time.monotonic() - 2)
    assert told == []
    step()
    assert every.after_step is None
    assert [round(loss.seconds) for loss in run.losses] == [5, 2]
    assert [text.partition(" in ")[0] for text in told] == [
        "mpitrain: lost: rank 0 (hosta)",
        "mpitrain: lost: rank 1 (hosta)",
    ] * is_root
    run._note(LostRanks((2,), ("hosta",), 1, 1, 12, 0.0), time.monotonic())
    step()
    assert len(told) == 3 * is_root
