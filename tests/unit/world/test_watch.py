"""The limit of the start."""

from __future__ import annotations

import time

import pytest

from mpitrain.world import watch


@pytest.mark.parametrize(("needed", "codes"), [(0.0, []), (0.5, [75])])
def test_the_start_has_a_limit(needed: float, codes: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    with watch.limit(0.2, ended.append):
        time.sleep(needed)
    assert ended == codes
    assert ("has waited 0 s for the others at the start" in capfd.readouterr().err) == bool(codes)
