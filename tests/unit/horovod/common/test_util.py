"""Small functions that scripts import from `horovod.common.util`."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mpitrain.horovod.common import util
from mpitrain.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt


@pytest.mark.parametrize(
    ("count", "parts", "expected"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 3, [1, 1, 0]), (0, 2, [0, 0])]
)
def test_split_list(count: int, parts: int, expected: list[int]) -> None:
    found = util.split_list(list(range(count)), parts)
    assert [len(part) for part in found] == expected
    assert [item for part in found for item in part] == list(range(count))


def test_variables_for_the_time_being(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_A", "before")
    monkeypatch.delenv("MPITRAIN_B", raising=False)
    with util.env(MPITRAIN_A="1", MPITRAIN_B="2", MPITRAIN_C=None):
        assert (os.environ["MPITRAIN_A"], os.environ["MPITRAIN_B"]) == ("1", "2")
        assert "MPITRAIN_C" not in os.environ
    assert os.environ["MPITRAIN_A"] == "before"
    assert "MPITRAIN_B" not in os.environ


@pytest.mark.parametrize(("number", "power"), [(0, False), (1, True), (2, True), (6, False), (8, True), (-2, False)])
def test_powers_of_two(number: int, power: bool) -> None:
    assert util.num_rank_is_power_2(number) == power


@pytest.mark.parametrize(("one", "other", "expected"), [("2.10.0", "2.9.1", True), ("2.9.0", "2.10.0", False)])
def test_versions_are_numbers(one: str, other: str, expected: bool) -> None:
    assert util.is_version_greater_equal_than(one, other) == expected


@pytest.mark.parametrize("given", [("2.1", "2.1"), (2, "2.1.0")])
def test_other_versions_are_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="three parts"):
        util.is_version_greater_equal_than(*given)


def test_what_there_is() -> None:
    assert [util.is_iterable(value) for value in ("", 3)] == [True, False]
    assert [util.extension_available(name) for name in ("tensorflow", "torch")] == [True, False]
    assert [util.mpi_built(), util.gloo_built(), util.nccl_built()] == [True, False, False]
    assert [HostsUpdatedInterrupt().skip_sync, HostsUpdatedInterrupt(True).skip_sync] == [False, True]
    assert issubclass(HorovodInternalError, RuntimeError)
