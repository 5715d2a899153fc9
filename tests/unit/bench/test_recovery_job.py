"""The events of a job that loses a rank."""

from __future__ import annotations

import time
from pathlib import Path

from mpitrain.bench.recovery_job import BEGUN, STEP, events, note


def test_events_are_read_as_they_were_noted(tmp_path: Path) -> None:
    assert events(tmp_path) == []
    before = time.time()
    for event in (BEGUN, STEP, STEP):
        note(tmp_path, event)
    found = events(tmp_path)
    assert [event for event, _ in found] == [BEGUN, STEP, STEP]
    moments = [moment for _, moment in found]
    assert before - 1e-5 <= moments[0] <= moments[1] <= moments[2] <= time.time() + 1e-5
