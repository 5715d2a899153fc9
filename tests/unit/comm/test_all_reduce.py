"""The choice of algorithm: the same on all ranks, cached, overridable; sums are right either way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpitrain.comm.all_reduce import CANDIDATES, SMALL_BYTES, VARIABLE, AllReduce, describe, parse
from mpitrain.comm.ring import RingSetting
from mpitrain.errors import UsageError
from tests import simulated


@pytest.mark.parametrize("setting", CANDIDATES)
def test_parse_reads_what_describe_writes(setting: RingSetting | None) -> None:
    assert parse(describe(setting)) == setting


BAD = ["", "ring", "ring:1", "ring:0:4", "ring:64:0", "ring:17:4", "ring:64:x", "nccl", "ring:-64:4"]


@pytest.mark.parametrize("text", BAD)
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        parse(text)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("hand", ["mpi", "ring:4096:3"])
@pytest.mark.parametrize("nbytes", [400, SMALL_BYTES, SMALL_BYTES + 4])
@pytest.mark.parametrize("in_place", [True, False])
def test_scaled_sum(size: int, hand: str, nbytes: int, in_place: bool) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> np.ndarray:
        source = np.full(nbytes // 4, communicator.rank + 1, np.float32)
        target = source if in_place else np.full_like(source, np.nan)
        AllReduce(communicator, "here", {VARIABLE: hand}).sum(source, target, 0.5)
        assert in_place or (source == communicator.rank + 1).all()
        return target

    for result in simulated.run(size, body):
        np.testing.assert_array_equal(result, size * (size + 1) / 4)


def test_choice_is_agreed_cached_and_read_again(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}

    def choose(layout: str) -> list[tuple[RingSetting | None, bool]]:
        def body(communicator: simulated.SimulatedCommunicator) -> tuple[RingSetting | None, bool]:
            chooser = AllReduce(communicator, layout, environ)
            return chooser.setting(), bool(chooser.measurements)

        return simulated.run(3, body)

    first = choose("layout one")
    assert first[0] == first[1] == first[2]
    assert first[0][1], "the first run measures"
    (file,) = (tmp_path / "mpitrain").glob("*.json")
    entry = json.loads(file.read_text())
    assert parse(entry["setting"]) == first[0][0]
    entry["setting"] = "ring:1600:5"
    file.write_text(json.dumps(entry))
    assert choose("layout one") == [(RingSetting(1600, 5), False)] * 3
    assert choose("layout two")[0][1], "another layout is measured anew"
    file.write_text("{ damaged")
    assert choose("layout one")[0][1], "a damaged cache is measured again"


def test_an_unwritable_cache_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "mpitrain").write_text("a file where the directory should be")

    def body(communicator: simulated.SimulatedCommunicator) -> RingSetting | None:
        return AllReduce(communicator, "here", {"XDG_CACHE_HOME": str(tmp_path)}).setting()

    results = simulated.run(2, body)
    assert results[0] == results[1]
