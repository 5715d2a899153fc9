"""Ranks that die while the others go on: who notices, what is told, what is trained, and how it ends."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpitrain.runtime.process_tree import descendants
from tests.launch.conftest import REPOSITORY, TAG, Finished, Job, Mpirun
from tests.launch.hosts import Hosts, missing, several

HERE = Path(__file__).parent
PLACES = str(HERE / "place_program.py")
PROGRAM, TRAINING, ELASTIC = (str(HERE / f"shrinking_{name}.py") for name in ("program", "training", "elastic"))
FAULT_TOLERANT = ("--with-ft", "ulfm")
RUN = (sys.executable, "-m", "mpitrain", "run", "--oversubscribe", "--allow-run-as-root", "--on-failure", "shrink")
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
DEATH = re.compile(r"^mpitrain: rank (\d) on \S+ was killed by SIGKILL.*; the others go on without it$", re.MULTILINE)
LOST = re.compile(r"^mpitrain: lost: ranks? (.+) in epoch \d+ after update (\d+); (\d) ranks? had made", re.MULTILINE)
WITHIN_SECONDS = 400


@pytest.fixture(autouse=True)
def only_open_mpi(request: pytest.FixtureRequest, mpirun: Mpirun) -> None:
    """MPICH ends a job when a rank dies: of these tests, only that of its refusal is for it."""
    if not mpirun.is_open_mpi and request.node.get_closest_marker("mpich") is None:
        pytest.skip("MPICH cannot")


def run(mpirun: Mpirun, ranks: int, options: Sequence[str], *words: str) -> Job:
    return mpirun.execute([*RUN, "-np", str(ranks), *options, *words], ENVIRONMENT)


def run_on(hosts: Hosts, mpirun: Mpirun, *words: str) -> Job:
    """Run on the first of them; processes on the others are found too."""
    handed = [word for name in (*hosts.environment, TAG) for word in ("-x", name)]
    environment = {**ENVIRONMENT, **hosts.environment}
    return mpirun.execute([*hosts.enter("node0"), *RUN, *handed, *words], environment)


def none_is_left(job: Job) -> Finished:
    finished = job.finish(WITHIN_SECONDS)
    assert job.processes() == [], finished.output
    return finished


@pytest.mark.parametrize(
    ("what", "ranks", "deaths", "left"),
    [
        ("header", 3, {0: 10, 1: 25}, [2]),
        ("small", 3, {1: 10}, [0, 2]),
        ("large", 3, {0: 10}, [1, 2]),
        ("ring", 4, {1: 10, 3: 10}, [0, 2]),
    ],
)
def test_the_others_go_on(mpirun: Mpirun, what: str, ranks: int, deaths: dict[int, int], left: list[int]) -> None:
    words = [PROGRAM, what, *(f"{rank}:{step}" for rank, step in deaths.items())]
    finished = none_is_left(mpirun.start(ranks, words, ENVIRONMENT, options=FAULT_TOLERANT))
    assert finished.returncode == 0, finished.output
    done = re.findall(r"^rank (\d) done as (\d) of (\d): \2 of \3$", finished.stdout, re.MULTILINE)
    places = [(str(rank), str(place), str(len(left))) for place, rank in enumerate(left)]
    assert sorted(done) == places, finished.output
    told = {int(rank) for rank in DEATH.findall(finished.stderr)}
    assert told <= set(deaths), finished.output
    assert 0 not in left or told, finished.output  # the hub was there all the time


def test_mpitrain_run_ends_well_and_tells_what_is_survived(mpirun: Mpirun) -> None:
    finished = none_is_left(run(mpirun, 3, ["--min-np", "2"], sys.executable, PROGRAM, "small", "1:10"))
    assert finished.returncode == 0, finished.output
    assert "ranks that are killed are gone on without, from the first update on, down to 2 ranks" in finished.stderr
    assert DEATH.findall(finished.stderr) == ["1"], finished.output


def test_too_few_are_left(mpirun: Mpirun) -> None:
    finished = none_is_left(run(mpirun, 3, ["--min-np", "3"], sys.executable, PROGRAM, "small", "1:10"))
    assert finished.returncode not in (0, 124), finished.output
    assert finished.stderr.count("of 3 ranks 2 are left, and the job goes on with 3 at least (--min-np)") == 1, (
        finished.output
    )


@pytest.mark.mpich
def test_what_cannot_be_done_is_refused(mpirun: Mpirun) -> None:
    finished = mpirun(2, [PROGRAM, "small"], env=ENVIRONMENT)
    assert finished.returncode == 2 or not mpirun.is_open_mpi, finished.output
    assert finished.returncode != 0, finished.output
    remedy = "mpirun --with-ft ulfm" if mpirun.is_open_mpi else r"take Open MPI 5 .*--on-failure restart"
    assert len(re.findall(rf"--on-failure shrink: .*{remedy}", finished.stderr)) == 1, finished.output


def test_a_rank_that_is_the_last_of_its_host(mpirun: Mpirun, hosts: Hosts) -> None:
    places = ["-H", "node0:1,node1:1,node2:1", "--map-by", "node", "--survive", "ranks"]
    job = run_on(hosts, mpirun, *places, sys.executable, PROGRAM, "large", "1:10")
    finished = none_is_left(job)
    assert finished.returncode == 0, finished.output
    assert re.findall(r"^rank (\d) done as (\d) of 2: 0 of 1$", finished.stdout, re.MULTILINE), finished.output
    assert "Not the loss of a host" in finished.stderr, finished.output


def test_without_daemons_ranks_are_where_they_belong_and_end(mpirun: Mpirun, hosts: Hosts) -> None:
    job = run_on(hosts, mpirun, "-H", "node0,node1:2,node2", "-x", "SEEN=a b;$c", sys.executable, PLACES, "wait")
    assert job.process.stdout is not None
    shown = [job.process.stdout.readline().strip() for _ in range(4)]
    places = [
        "node 0, local 0 on node0",
        "node 1, local 0 on node1",
        "node 1, local 1 on node1",
        "node 2, local 0 on node2",
    ]
    expected = [f"rank {rank} of 4: {place}, SEEN=a b;$c, UNSEEN=None" for rank, place in enumerate(places)]
    assert sorted(shown) == expected, shown
    assert len(job.processes()) > 4
    os.kill(descendants(job.process.pid)[0], signal.SIGINT)  # what was started on the host
    finished = none_is_left(job)
    assert finished.returncode != 0, finished.output
    assert "was lost" not in finished.stderr, finished.output


@pytest.mark.parametrize("silently", [False, True])
def test_a_host_is_lost_before_its_ranks_have_met_the_others(mpirun: Mpirun, tmp_path: Path, silently: bool) -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with several(2, tmp_path) as hosts:
        options = ["-H", "node0,node1", "--restarts", "1"]
        job = run_on(hosts, mpirun, *options, sys.executable, PLACES, "late")
        assert job.process.stdout is not None
        assert job.process.stdout.readline() == "late on node1\n", none_is_left(job).output
        hosts.kill("node1", silently)
        killed = time.monotonic()
        finished = none_is_left(job)
    assert time.monotonic() - killed < 60, finished.output
    assert finished.returncode == 0, finished.output
    assert "mpitrain: the connection to node1 was lost before all ranks had met" in finished.stderr, finished.output
    assert "; restart 1 of 1 in 1 s, with 1 rank, without node1, " in finished.stderr, finished.output
    assert finished.stdout.startswith("rank 0 of 1: node 0, local 0 on node0"), finished.output


def test_training_goes_on_without_hosts(mpirun: Mpirun, hosts: Hosts, tmp_path: Path) -> None:
    """The last test of this module with hosts: they do not come back."""

    def lose(name: str, silently: bool) -> None:
        while not (tmp_path / f"reached-{name[-1]}").exists():
            time.sleep(0.05)
        hosts.kill(name, silently)

    for name, silently in (("node1", False), ("node2", True)):
        threading.Thread(target=lose, args=(name, silently), daemon=True).start()
    options = ["-H", ",".join(hosts.names), "--start-timeout", "150"]
    kills = ["1:reach:10:0", "2:reach:25:0"]
    finished = none_is_left(
        run_on(hosts, mpirun, *options, sys.executable, TRAINING, str(tmp_path), "all-reduce", *kills)
    )
    assert finished.returncode == 0, finished.output
    assert "and hosts that are lost, are gone on without" in finished.stderr, finished.output
    for name in ("node1", "node2"):
        told = f"mpitrain: the connection to {name} was lost; the other hosts go on without it\n"
        assert finished.stderr.count(told) == 1, finished.output
    # That weights are those of each sample seen once, the program has looked at.
    assert re.search(r"^rank 0 is 0 of 1, after \d+ updates, ", finished.stdout, re.MULTILINE), finished.output
    assert LOST.findall(finished.stderr) == [("1 (node1)", "10", "2"), ("2 (node2)", "25", "1")], finished.output


def test_training_makes_each_update_as_a_whole_and_sees_each_sample_once(mpirun: Mpirun, tmp_path: Path) -> None:
    choose = random.Random(6)
    first, second, third = choose.sample(range(4), 3)
    kills = [
        f"{first}:update:{choose.randint(2, 20)}:{choose.uniform(0, 20):.1f}",
        f"{second}:update:{choose.randint(22, 45)}:{choose.uniform(0, 20):.1f}",
        f"{third}:test:3:{choose.uniform(0, 20):.1f}",
    ]
    words = [sys.executable, TRAINING, str(tmp_path), "all-reduce", *kills]
    finished = none_is_left(run(mpirun, 4, ["--start-timeout", "150"], *words))
    assert finished.returncode == 0, f"{kills}\n{finished.output}"
    (last,) = {0, 1, 2, 3} - {first, second, third}
    assert re.search(rf"^rank {last} is 0 of 1, after \d+ updates, ", finished.stdout, re.MULTILINE), finished.output
    assert [int(left) for _, _, left in LOST.findall(finished.stderr)] == [3, 2, 1], finished.output
    told = re.findall(r"^mpitrain: rank (\d) on \S+ .*; the others go on without it$", finished.stderr, re.MULTILINE)
    assert sorted(map(int, told)) == sorted([first, second, third]), finished.output


def test_machine_code_goes_on_with_those_that_are_left(mpirun: Mpirun, tmp_path: Path) -> None:
    """To the same bits as Python. What it leaves to Python is the beginning, and the first bucket after the loss."""
    weights, left = [], []
    for engine in ("native", "python"):
        folder = tmp_path / engine
        folder.mkdir()
        words = [TRAINING, str(folder), "all-reduce", "1:at:12:0"]
        environment = {**ENVIRONMENT, "MPITRAIN_ENGINE": engine}
        finished = none_is_left(mpirun.start(3, words, environment, options=FAULT_TOLERANT))
        assert finished.returncode == 0, finished.output
        assert [loss[1:] for loss in LOST.findall(finished.stderr)] == [("12", "2")], finished.output
        weights += re.findall(r"with weights (\w+)$", finished.stdout, re.MULTILINE)
        left += re.findall(r"^buckets of Python: (\w+)$", finished.stdout, re.MULTILINE)
    assert len(weights) == 4
    assert len(set(weights)) == 1
    assert left[2:] == ["all"] * 2
    assert all(int(count) < 20 for count in left[:2]), left  # of hundreds


def test_workers_of_a_parameter_server_see_each_sample_once(mpirun: Mpirun, tmp_path: Path) -> None:
    choose = random.Random(7)
    first, second, last = choose.sample(range(1, 4), 3)
    kills = [f"{first}:update:{choose.randint(2, 150)}:{choose.uniform(0, 40):.1f}", f"{second}:test:4:5.0"]
    words = [sys.executable, TRAINING, str(tmp_path), "ps", *kills]
    finished = none_is_left(run(mpirun, 4, ["--start-timeout", "150"], *words))
    assert finished.returncode == 0, f"{kills}\n{finished.output}"
    assert re.search(rf"^rank {last} is 0 of 1, after \d+ updates, ", finished.stdout, re.MULTILINE), finished.output
    assert [int(left) for _, _, left in LOST.findall(finished.stderr)] == [2, 1], finished.output


def test_the_default_job_loses_rank_0(mpirun: Mpirun, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    own = ["--model", "mlp", "--epochs", "12", "--output", str(tmp_path), "--checkpoint-dir", str(checkpoints)]
    job = run(mpirun, 3, ["--start-timeout", "150"], *own, "--checkpoint-every", "3steps")
    assert job.process.stdout is not None
    shown = next((line for line in job.process.stdout if line.startswith("epoch 2/12")), None)
    if shown is not None:
        os.kill(pid_of(job, 0), signal.SIGKILL)
    finished = none_is_left(job)
    assert finished.returncode == 0, finished.output
    (accuracy,) = re.findall(r"^result +accuracy ([\d.]+)", finished.stdout, re.MULTILINE)
    assert float(accuracy) > 0.9, finished.output
    assert "epoch 12/12" in finished.stdout, "the next rank shows what the first did"
    assert re.search(r"^lost +rank 0 \(\S+\) in epoch \d after update \d+; 2 ranks", finished.stdout, re.MULTILINE)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ranks"], len(summary["history"]["loss"])) == (2, 12)
    assert [loss["ranks"] for loss in summary["losses"]] == [[0]]
    manifest = json.loads((max(checkpoints.glob("checkpoint-*")) / "manifest.json").read_text())["info"]
    assert (manifest["position"]["epoch"], manifest["ranks"]) == (12, 2), "the next rank writes what the first did"
    assert manifest["history"] == summary["history"]


def test_what_horovods_elastic_run_runs_goes_on_from_its_last_commit(mpirun: Mpirun) -> None:
    finished = none_is_left(run(mpirun, 3, ["--start-timeout", "150"], sys.executable, ELASTIC))
    assert finished.returncode == 0, finished.output
    assert sorted(re.findall(r"^rank \d is \d of 2$", finished.stdout, re.MULTILINE)) == [
        "rank 0 is 0 of 2",
        "rank 2 is 1 of 2",
    ]


def pid_of(job: Job, rank: int) -> int:
    """The process of a rank."""
    marks = {f"OMPI_COMM_WORLD_RANK={rank}".encode(), b"MPITRAIN_ON_FAILURE=shrink"}
    return next(
        pid for pid in job.processes() if marks <= set((Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"))
    )
