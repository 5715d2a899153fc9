"""Headers: every rank learns of a difference, by name."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.ring import RingSetting
from mpitrain.errors import MismatchError, RankFinishedError
from mpitrain.world.agreement import Agreement
from tests import simulated


def agreement(communicator: simulated.SimulatedCommunicator) -> Agreement:
    return Agreement(communicator, [f"host{rank}" for rank in range(communicator.size)])


class MachineCode:
    """Which takes the turn as well."""

    def take(self, words: Any) -> bool:
        """Local."""
        is_free = not words[0]
        words[0 if is_free else 1] = 1
        return is_free

    def give(self, words: Any) -> None:
        """Local."""
        words[0] = 0


def test_machine_code_that_comes_while_a_thread_has_the_turn() -> None:
    """It waits; and what it takes afterwards nobody gives back for it."""

    def body(communicator: simulated.SimulatedCommunicator) -> None:
        turn, code = agreement(communicator).turn, MachineCode()
        with turn:
            with turn:
                turn.share_with(code)
            assert not code.take(turn.words)
            turn.contended = False  # which it has told
        assert code.take(turn.words)
        with turn.handed_over(), turn:
            pass
        assert turn.words[0]
        code.give(turn.words)
        with turn:
            assert turn.words[0]
        assert turn.words[:2].tolist() == [0, 0]

    simulated.run(1, body)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_samples_of_all_ranks(size: int) -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> list[float]:
        own = agreement(communicator)
        own.report = (communicator.rank, 0.0, 0.0)
        own.request = 1 << communicator.rank
        agreed = own.call("update", samples=10.0 * communicator.rank)
        assert agreed.reports[:, 0].tolist() == list(range(size))
        assert agreed.requests.tolist() == [1 << rank for rank in range(size)]
        assert agreed.active.all()
        return agreed.samples.tolist()

    assert simulated.run(size, body) == [[10.0 * rank for rank in range(size)]] * size


def test_mismatch_raises_on_every_rank_and_names_the_difference() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> str:
        shape = 4 if communicator.rank == 2 else 3
        lines = ["update of 50 gradients", *[f"layer{i}/kernel float32[3, 3]" for i in range(49)]]
        lines[30] = f"layer29/kernel float32[3, {shape}]"
        with pytest.raises(MismatchError) as caught:
            agreement(communicator).call("\n".join(lines))
        return str(caught.value)

    for text in simulated.run(3, body):
        assert "ranks 0, 1 (host0, host1): update of 50 gradients ... item 30: layer29/kernel float32[3, 3]" in text
        assert "rank 2 (host2): update of 50 gradients ... item 30: layer29/kernel float32[3, 4]" in text


def test_idle_ranks_take_part_where_allowed() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> tuple[list[bool], list[float]]:
        own = agreement(communicator)
        agreed = own.idle() if communicator.rank == 1 else own.call("update", samples=5.0, idle_ok=True)
        assert agreed.active.any()
        return agreed.active.tolist(), agreed.samples.tolist()

    assert simulated.run(3, body) == [([True, False, True], [5.0, 0.0, 5.0])] * 3


def test_two_threads_of_one_rank_are_refused_on_all() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> list[str]:
        own, errors, inside = agreement(communicator), [], threading.Event()

        def call(first: bool) -> None:
            try:
                with own.turn:
                    own.call("operation")
                    inside.set()
                    while first and communicator.rank == 0 and not own.turn.contended:
                        time.sleep(0.001)
            except MismatchError as error:
                errors.append(str(error))

        calls = [threading.Thread(target=call, args=(first,)) for first in (True, False)]
        calls[0].start()
        if communicator.rank == 0:
            inside.wait()
        else:
            calls[0].join()
        calls[1].start()
        for one in calls:
            one.join(10.0)
            assert not one.is_alive()
        own.leave()
        return errors

    text = "call collectives at the same time, and other ranks may call them in another order"
    own, *others = simulated.run(3, body)
    assert sorted(error[: error.index(text)] for error in own) == [
        "several threads of rank 0 (host0) ",
        "several threads of this rank ",
    ]
    assert [[error[: error.index(text)] for error in errors] for errors in others] == [
        [own[-1][: own[-1].index(text)]]
    ] * 2


def test_threads_that_come_in_another_order_on_another_rank_are_told_of_as_threads() -> None:
    both_in = threading.Event()

    def body(communicator: simulated.SimulatedCommunicator) -> str:
        own = agreement(communicator)

        def second() -> None:
            with pytest.raises(MismatchError), own.turn:
                pass

        def watch() -> None:
            while communicator.activity.inside is None:
                time.sleep(0.001)
            thread.start()
            while not own.turn.contended:
                time.sleep(0.001)
            both_in.set()

        thread, watcher = threading.Thread(target=second), threading.Thread(target=watch)
        if communicator.rank == 0:
            watcher.start()
        else:
            both_in.wait(10.0)
        with pytest.raises(MismatchError) as caught:
            own.call(f"operation {communicator.rank}")
        if communicator.rank == 0:
            watcher.join()
            thread.join()
        return str(caught.value)

    assert {text.partition(" call ")[0] for text in simulated.run(3, body)} == {"several threads of rank 0 (host0)"}


def test_a_finished_rank_is_named_to_those_who_wait() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> str:
        if communicator.rank == 1:
            agreement(communicator).idle(finished=True)
            return ""
        with pytest.raises(RankFinishedError) as caught:
            agreement(communicator).call("barrier")
        return str(caught.value)

    text = simulated.run(2, body)[0]
    assert "rank 0 (host0) called barrier, but rank 1 (host1) will not come" in text


def test_all_idle_and_all_finished_are_told_apart() -> None:
    def body(communicator: simulated.SimulatedCommunicator) -> tuple[object, bool, bool]:
        own = agreement(communicator)
        mixed = own.idle(finished=communicator.rank == 0)
        ended = own.idle(finished=True)
        return mixed.call, mixed.finished, ended.finished

    assert simulated.run(2, body) == [(None, False, True)] * 2


class Shrinking:
    """A communicator that has other ranks from some moment on, as that of MPI has."""

    def __init__(self, before: Any, after: Any) -> None:
        self._now, self._after = before, after

    def shrink(self) -> None:
        self._now = self._after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


@pytest.mark.parametrize("left", [[0, 2], [1, 2], [2]])
def test_agreement_and_sums_go_on_among_those_that_are_left(left: list[int]) -> None:
    def rank(communicator: simulated.SimulatedCommunicator) -> None:
        part: Any = communicator.split(left)
        both: Any = Shrinking(communicator, part)
        agreement = Agreement(both, ["a", "b", "c"])
        all_reduce = AllReduce(both, "three", {"MPITRAIN_ALL_REDUCE": "ring:1024:2"})
        source, target = np.full(200_000, communicator.rank + 1.0), np.empty(200_000)

        def check(ranks: list[int]) -> None:
            assert agreement.call("sum").samples.tolist() == [1.0] * len(ranks)
            for size in (10, 200_000):
                all_reduce.sum(source[:size], target[:size])
                assert (target[:size] == sum(ranks) + len(ranks)).all()

        check([0, 1, 2])
        if part is not None:
            both.shrink()
            agreement.renew([["a", "b", "c"][rank] for rank in left], left)
            all_reduce.renew("fewer", chosen=True)
            check(left)
            assert all_reduce.setting() == RingSetting(1024, 2)
            assert agreement.name([0]) == f"rank {left[0]} ({'abc'[left[0]]})"

    simulated.run(3, rank)
