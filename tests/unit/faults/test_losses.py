"""What a job that goes on without lost ranks is told, counts, and takes over."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

import numpy as np
import pytest

from mpitrain.comm import simulated
from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.ring import RingSetting
from mpitrain.errors import UsageError
from mpitrain.faults.activity import Activity
from mpitrain.faults.hub import Hub
from mpitrain.faults.losses import SILENT_SECONDS, TOLD_SECONDS, Losses
from mpitrain.faults.members import Member
from mpitrain.faults.neighbours import Neighbours
from mpitrain.faults.options import FaultOptions
from mpitrain.faults.processes import Process
from mpitrain.faults.report import Culprit, Fault
from mpitrain.faults.roster import Roster, Seat
from mpitrain.faults.wire import Link
from mpitrain.launch.dialect import INTEL_MPI, MPICH, OPEN_MPI, Mpi
from mpitrain.launch.job import Job, Srun
from mpitrain.launch.request import Request
from mpitrain.launch.surviving import RANKS, promise, surviving
from mpitrain.runtime.hostfile import parse
from mpitrain.world.agreement import Agreement

REQUEST = Request(("program",), 4, parse("a:2,b:2", "test"), environment={"A": "b"}, extra=("--mca", "x", "1"))


def job(kind: str, version: tuple[int, ...], srun: Srun | None = None) -> Job:
    return Job(REQUEST, Mpi(kind, version), "/bin/mpirun", srun=srun)


def test_the_command_of_a_job_that_survives() -> None:
    command = surviving(job(OPEN_MPI, (5, 0, 11)), 2, RANKS).command({}, "ssh")
    words = " ".join(command.argv)
    assert "--with-ft ulfm --mca ompi_async_mpi_finalize 1 --mca x 1 program" in words
    assert "-x MPITRAIN_MIN_NP -x MPITRAIN_ON_FAILURE" in words
    given = command.environ({})
    assert (given["A"], given["MPITRAIN_ON_FAILURE"], given["MPITRAIN_MIN_NP"]) == ("b", "shrink", "2")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (job(OPEN_MPI, (4, 1)), "needs Open MPI 5, and Open MPI 4.1 ends a job.*--on-failure restart"),
        (job(MPICH, (5, 0)), "needs Open MPI 5, and MPICH 5.0 ends a job.*--on-failure restart"),
        (job(INTEL_MPI, (2021, 18)), "needs Open MPI 5, and Intel MPI 2021.18"),
        (job(OPEN_MPI, (5,), Srun("/bin/srun", "pmix")), "--launcher mpirun; --on-failure restart"),
    ],
)
def test_what_cannot_survive_is_refused(asked: Job, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        surviving(asked, 1)


def test_what_is_survived_is_told() -> None:
    several = job(OPEN_MPI, (5,))
    assert "down to 2 ranks" in promise(several, 2)
    here = dataclasses.replace(several, request=dataclasses.replace(REQUEST, hosts=()))
    assert "down to 1 rank:" in promise(here, 1)
    assert "host" not in promise(here, 1)


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, {}, ("abort", 1)),
        ({"MPITRAIN_ON_FAILURE": "shrink", "MPITRAIN_MIN_NP": "3"}, {}, ("shrink", 3)),
        ({"MPITRAIN_ON_FAILURE": "shrink", "MPITRAIN_MIN_NP": "3"}, {"on_failure": "abort"}, ("abort", 3)),
        ({"MPITRAIN_ON_FAILURE": "shrink"}, {"on_failure": "abort", "min_np": 2}, "--min-np does nothing without"),
        ({"MPITRAIN_ON_FAILURE": "restart"}, {}, "on-failure .* is 'restart': choose one of abort, shrink"),
        ({"MPITRAIN_MIN_NP": "0"}, {}, "min-np .* is 0: it must be at least 1"),
        ({"MPITRAIN_MIN_NP": "few"}, {}, "min-np .* is 'few'"),
    ],
)
def test_options(environ: dict[str, str], given: dict[str, Any], expected: tuple[str, int] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            FaultOptions.of(environ, **given)
    else:
        options = FaultOptions.of(environ, **given)
        assert (options.on_failure, options.min_np) == expected


@pytest.mark.parametrize(
    ("on_failure", "status", "survived"),
    [
        ("shrink", 9, True),
        ("shrink", None, True),  # on another host
        ("shrink", 1 << 8, False),  # Open MPI ends the job
        ("abort", 9, False),
    ],
)
def test_which_deaths_are_survived(on_failure: str, status: int | None, survived: bool) -> None:
    losses = Losses(FaultOptions(on_failure=on_failure))
    losses.need([0])
    assert losses.survives(1, status) == survived
    assert not losses.survives(0, status)  # it hosts parameters


def test_a_new_hub_does_not_tell_of_old_losses() -> None:
    told: list[str] = []
    said: list[dict[str, object]] = []
    death = Fault("death", "was killed by SIGKILL", 137, (Culprit(0, "hosta", 1),), "SIGKILL")
    one, other, late = (Losses(FaultOptions(on_failure="shrink")) for _ in range(3))
    for losses in (one, other, late):
        losses.note([0], 10.0)
    one.tell(death, 10.0, told.append, said.append)
    assert (len(told), said) == (1, [one.answer])
    other.tell(death, 10.0 + TOLD_SECONDS / 2, told.append, said.append)  # that hub may have died before it could
    late.tell(death, 11.0 + TOLD_SECONDS, told.append, said.append)
    assert told == ["mpitrain: rank 0 on hosta was killed by SIGKILL; the others go on without it\n"] * 2
    heard = Losses(FaultOptions(on_failure="shrink"))
    heard.note([0], 10.0)
    heard.hear(one.answer)
    heard.tell(death, 10.0, told.append, said.append)
    one.tell(death, 10.0, told.append, said.append)
    assert (len(told), len(said)) == (2, 2)


def test_a_lost_rank_whose_connection_stays_is_missed() -> None:
    losses = Losses(FaultOptions(on_failure="shrink"))
    losses.note([1, 2], 10.0)
    assert losses.untold(3, [0, 1], 10.0) == {}
    assert losses.untold(3, [0, 1], 10.0 + SILENT_SECONDS) == {1: 10.0}
    assert losses.untold(0, [0, 1], 10.0 + SILENT_SECONDS) == {1: 10.0, 2: 10.0}  # the first tells of all
    losses.at_end = True
    assert losses.untold(3, [0, 1], 10.0) == {1: 10.0}
    losses.note([0], 11.0)
    assert losses.untold(3, [], 11.0) == {1: 10.0, 2: 10.0, 0: 11.0}


def test_a_rank_of_a_silent_host_is_told_of_and_holds_up_nobody() -> None:
    process = Process(os.getpid(), 0)
    seats = tuple(Seat(rank, f"host{rank}", rank, process, ()) for rank in range(3))
    roster, options = Roster(0, seats, "token"), FaultOptions(on_failure="shrink", stall_warning=30, stall_abort=60)
    told: list[str] = []
    ended: list[int] = []
    activity = Activity()
    hub = Hub(roster, options, Neighbours(roster), told.append, lambda code, _: ended.append(code), 10.0, activity)
    here, there = socket.socketpair()
    with here, there:
        for rank in (1, 2):
            hub.members[rank] = Member(Link(here), 0.0)
        # It waited for long, and then its host was gone.
        hub.hear(2, {"is": "beat", "position": 5, "waiting": 59.5, "updates": 7, "resident": 2048}, 0.0)
        hub.losses.note([2], 1.0)
        for now in (1.0, 1.0 + SILENT_SECONDS, 3.0, 80.0):
            hub.hear(1, {"is": "beat", "position": 9, "waiting": 0.1}, now)
            hub.tick(now)
    assert (set(hub.members), ended) == ({1}, [])
    assert "".join(told) == (
        "mpitrain: rank 2 on host2 ended without a word (killed, or its host is gone) after update 7, with 2.0 KiB of "
        "memory when last heard of; the others go on without it\n"
    )


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
