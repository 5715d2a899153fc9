"""Errors that some ranks have, on groups of threads that exchange real messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import AgreedError, DataError
from mpitrain.world.consensus import check_equal, run_on_all, run_on_root
from tests.simulated import run

HOSTS = ("a", "b", "c")


def outcomes(action: Callable[[int], Any]) -> list[Any]:
    """What `run_on_all` gives or raises on each of three ranks."""

    def on_rank(communicator: Any) -> Any:
        try:
            return run_on_all(communicator, HOSTS, lambda: action(communicator.rank))
        except AgreedError as error:
            return str(error)

    return run(3, on_rank)


def test_results_when_nothing_is_wrong() -> None:
    assert outcomes(lambda rank: rank * 10) == [0, 10, 20]


def test_error_of_one_rank_names_it_on_all() -> None:
    def action(rank: int) -> None:
        if rank == 1:
            raise DataError("there is no file")

    assert outcomes(action) == ["on rank 1 (b) only: there is no file"] * 3


def test_error_of_all_ranks_names_none() -> None:
    def action(rank: int) -> None:
        raise DataError("there is no file")

    assert outcomes(action) == ["there is no file"] * 3


def test_first_of_different_errors() -> None:
    def action(rank: int) -> None:
        if rank:
            raise DataError(f"wrong on {'both' if rank < 3 else ''}")

    assert outcomes(action) == ["on ranks 1 (b), 2 (c) only: wrong on both"] * 3


def test_values_that_differ() -> None:
    def on_rank(communicator: Any) -> str:
        try:
            check_equal(communicator, HOSTS, {"x": 1, "the count": 5 if communicator.rank < 2 else 6})
        except AgreedError as error:
            return str(error)
        return ""

    expected = "the count must be the same on all ranks, but is 5 on rank 0 (a) and 6 on rank 2 (c)"
    assert [text.partition(":")[0] for text in run(3, on_rank)] == [expected] * 3


def test_root_alone_acts_and_all_hear() -> None:
    acted = []

    def on_rank(communicator: Any) -> str:
        def action() -> None:
            acted.append(communicator.rank)
            raise DataError("the disk is full")

        try:
            run_on_root(communicator, action)
        except AgreedError as error:
            return str(error)
        return ""

    assert run(3, on_rank) == ["the disk is full"] * 3
    assert acted == [0]


def test_other_errors_pass_through() -> None:
    def action() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_on_all(LocalCommunicator(), HOSTS[:1], action)
