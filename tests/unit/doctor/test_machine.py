"""What is said about the size of the job, memory, clocks and GPUs, from facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpitrain.doctor.facts import Clock, Graphics
from mpitrain.doctor.finding import Finding, merged, worst
from mpitrain.doctor.job import PlannedJob
from mpitrain.doctor.job import check as check_job
from mpitrain.doctor.machine import GIB, MIB
from mpitrain.doctor.machine import check as check_machine
from mpitrain.launch.dialect import Mpi
from mpitrain.runtime.hostfile import Host
from tests.unit.doctor.hosts import MPICH_5, OPEN_MPI_5, host, hosts

TWO = (Host("node0", 2), Host("node1", 2))
CROWD = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def job_findings(ranks: int, mpi: Mpi, environ: dict[str, str], listed: Any = TWO, **changes: Any) -> list[Finding]:
    facts = hosts(2, node1=host(1, **changes))
    return [f for f in check_job(PlannedJob(listed, ranks, environ), mpi, facts) if f.colour != "green"]


def machine_findings(ranks: int = 4, **changes: Any) -> list[Finding]:
    facts = hosts(2, node1=host(1, **changes))
    return [f for f in check_machine(PlannedJob(TWO, ranks), facts) if f.colour != "green"]


@pytest.mark.parametrize(
    ("slots", "ranks", "expected"),
    [((2, 2), 4, [2, 2]), ((2, 2), 3, [2, 1]), ((4, 1), 2, [2, 0]), ((2, 2), 7, [4, 3]), ((1, 3), 6, [2, 4])],
)
def test_ranks_fill_slots_and_then_go_round(slots: tuple[int, ...], ranks: int, expected: list[int]) -> None:
    listed = [Host(f"h{number}", count) for number, count in enumerate(slots)]
    assert list(PlannedJob(listed, ranks).ranks_on.values()) == expected


def test_a_job_as_it_should_be() -> None:
    assert job_findings(4, OPEN_MPI_5, {}) == machine_findings() == []


@pytest.mark.parametrize(
    ("ranks", "mpi", "environ", "colour"),
    [(5, OPEN_MPI_5, {}, "red"), (5, OPEN_MPI_5, CROWD, "yellow"), (5, MPICH_5, {}, "red")],
)
def test_more_ranks_than_slots(ranks: int, mpi: Mpi, environ: dict[str, str], colour: str) -> None:
    (found,) = job_findings(ranks, mpi, environ)
    assert (found.check, found.colour) == ("slots", colour)
    assert found.sentence.startswith("5 ranks, but only 4 slots")
    assert found.remedy.startswith("-np 4")


def test_max_slots() -> None:
    (found,) = job_findings(6, MPICH_5, {}, (Host("node0", 2, 2), Host("node1", 2)))
    assert (found.check, found.colour, found.hosts) == ("slots", "red", ("node0",))
    assert "max_slots=2" in found.sentence


@pytest.mark.parametrize(
    ("mpi", "environ", "remedy"),
    [
        (OPEN_MPI_5, {}, "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        (OPEN_MPI_5, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        (OPEN_MPI_5, {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}, None),
        (MPICH_5, {}, None),
    ],
)
def test_root(mpi: Mpi, environ: dict[str, str], remedy: str | None) -> None:
    found = job_findings(2, mpi, environ, root=True)
    assert [(f.check, f.colour) for f in found] == ([("user", "red")] if remedy else [])
    assert all(remedy in f.remedy for f in found if remedy)


def test_srun_does_not_mind_root() -> None:
    facts = {"node0": host(root=True)}
    found = check_job(PlannedJob(TWO[:1], 2), OPEN_MPI_5, facts, srun=True)
    assert [f.colour for f in found if f.check == "user"] == ["green"]


def test_more_ranks_than_cores_and_gpus() -> None:
    (cores,) = job_findings(4, OPEN_MPI_5, {}, cores=1)
    assert (cores.check, cores.colour, cores.hosts) == ("cores", "yellow", ("node1",))
    (gpus,) = job_findings(4, OPEN_MPI_5, {}, graphics=Graphics(devices=1))
    assert (gpus.check, gpus.colour) == ("ranks and GPUs", "red")
    assert "2 ranks, but only 1 usable GPU" in gpus.sentence
    assert "--share-gpus" in gpus.remedy
    assert job_findings(4, OPEN_MPI_5, {}, graphics=Graphics(devices=4, visible="1,3")) == []
    assert job_findings(4, OPEN_MPI_5, {}, graphics=Graphics(devices=4, visible="3")) != []


@pytest.mark.parametrize(
    ("changes", "check_name", "colour", "sentence", "remedy"),
    [
        ({"shared_memory_bytes": 64 * MIB}, "shared memory", "yellow", "/dev/shm has 64 MiB", "--shm-size"),
        ({"shared_memory_bytes": 16 * MIB}, "shared memory", "red", "/dev/shm has 16 MiB", "--shm-size"),
        ({"shared_memory_bytes": 0}, "shared memory", "red", "/dev/shm has 0 MiB", "--shm-size"),
        (
            {"memory_bytes": GIB * 3 // 2},
            "memory",
            "yellow",
            "1.5 GiB free for 2 ranks: 768 MiB each",
            "at most 1 rank on",
        ),
        ({"memory_bytes": GIB // 2}, "memory", "red", "256 MiB each", "at most 1 rank on"),
        ({"clock": Clock(-60.0, 0.01)}, "clock", "red", "60.0 s behind the others", "ssh node1 'sudo timedatectl"),
        (
            {"clock": Clock(5.0, 0.01)},
            "clock",
            "yellow",
            "5.0 s ahead of the others (measured within 0.01 s)",
            "chrony",
        ),
    ],
)
def test_machines(changes: dict[str, Any], check_name: str, colour: str, sentence: str, remedy: str) -> None:
    (found,) = machine_findings(**changes)
    assert (found.check, found.colour, found.hosts) == (check_name, colour, ("node1",))
    assert sentence in found.sentence
    assert remedy in found.remedy


def test_a_clock_is_not_blamed_for_a_slow_way() -> None:
    assert machine_findings(clock=Clock(2.0, 1.5)) == []


def test_the_clock_that_is_wrong_is_the_one_that_differs_from_most() -> None:
    ahead = {"node0": 0.0, "node1": 60.0, "node2": 60.01}
    facts = {name: host(number, clock=Clock(value, 0.0)) for number, (name, value) in enumerate(ahead.items())}
    found = [f for f in check_machine(PlannedJob(TWO, 4), facts) if f.colour != "green"]
    assert [(f.check, f.hosts) for f in found] == [("clock", ("node0",))]
    assert "60.0 s behind" in found[0].sentence


CUDA = {"is_cuda_build": "True", "cuda_version": "12.5.1"}
CARD = ("NVIDIA A100, 550.54.15, 40960 MiB",)


@pytest.mark.parametrize(
    ("graphics", "colour", "sentence", "remedy"),
    [
        (Graphics(), "green", "uses the CPU", ""),
        (Graphics(driver="550.54.15"), "yellow", "no GPU may be opened", "docker run --gpus all"),
        (Graphics(CARD, "550.54.15", 1, "", CUDA), "yellow", "1 GPU, all hidden by CUDA_VISIBLE_DEVICES=", "unset"),
        (Graphics(CARD, "550.54.15", 1, None, {}), "yellow", "without CUDA", "install 'tensorflow[and-cuda]'"),
        (
            Graphics(CARD, "470.82.01", 1, None, CUDA),
            "red",
            "470.82.01 is too old for TensorFlow's CUDA 12.5.1: it needs 525.60",
            "newer driver",
        ),
        (Graphics(CARD, "550.54.15", 1, None, CUDA), "yellow", "cuDNN is not installed", "and-cuda"),
        (Graphics(CARD, "550.54.15", 1, None, CUDA, cudnn=True), "green", "1 usable; driver 550.54.15", ""),
        (Graphics(CARD, "", 1, None, CUDA, cudnn=True), "green", "driver 550.54.15", ""),
    ],
)
def test_gpus(graphics: Graphics, colour: str, sentence: str, remedy: str) -> None:
    facts = {"node0": host(graphics=graphics)}
    (found,) = [f for f in check_machine(PlannedJob(TWO[:1], 1), facts) if f.check == "GPU"]
    assert found.colour == colour
    assert sentence in found.sentence
    assert remedy in found.remedy


def test_the_same_on_several_hosts_is_one_line() -> None:
    fine, wrong, other = (
        Finding("a", ("x",), "green", "fine"),
        Finding("a", ("y",), "red", "no"),
        Finding("b", (), "green", ""),
    )
    assert merged([fine, other, wrong, replace(fine, hosts=("z",))]) == (replace(fine, hosts=("x", "z")), wrong, other)
    assert worst([fine, wrong, fine]) == "red"
    assert worst([fine]) == worst([]) == "green"
