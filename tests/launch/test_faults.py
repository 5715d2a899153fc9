"""Ranks that stop, are killed, leave, or do not fit together: what is told, how soon the job is over, what is left."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, Finished, Job, Mpirun

pytestmark = pytest.mark.mpich

PROGRAM = str(Path(__file__).with_name("exchanging_program.py"))
WARNING, ABORT = 4, 8
TOLD = re.compile(r"^mpitrain: (?!warning)", re.MULTILINE)


def start(mpirun: Mpirun, ranks: int, *args: str, **env: str) -> Job:
    limits = {"MPITRAIN_STALL_WARNING": str(WARNING), "MPITRAIN_STALL_ABORT": str(ABORT)}
    return mpirun.start(ranks, [PROGRAM, *args], env={"PYTHONPATH": str(REPOSITORY), **limits, **env})


def finish(job: Job, told: int | None = 1) -> tuple[Finished, float]:
    """The job, and the seconds from the fault to its end; nothing of it is left."""
    finished = job.finish(150)
    ended = time.time()
    for _ in range(100):
        if not job.processes():
            break
        time.sleep(0.02)
    assert job.processes() == [], finished.output
    assert len(TOLD.findall(finished.stderr)) in ([0, 1] if told is None else [told]), finished.output
    found = re.search(r"at (\d+\.\d+)", finished.stdout)
    return finished, ended - float(found[1]) if found else 0.0


@pytest.mark.parametrize(("rank", "way"), [(1, "python"), (0, "python"), (1, "native")])
def test_a_stopped_rank(mpirun: Mpirun, tmp_path: Path, rank: int, way: str) -> None:
    report = tmp_path / "report"
    variables = {"MPITRAIN_FAILURE_REPORT": str(report), **({"IN_GRAPH": "1"} if way == "native" else {})}
    job = start(mpirun, 3, "SIGSTOP", str(rank), "60", **variables)
    finished, seconds = finish(job, told=2)
    assert finished.stdout.count(f"by {way}") == (3 if way == "native" else 0), finished.output
    assert finished.returncode == 75, finished.output
    assert ABORT - 2 < seconds < ABORT + 5, finished.output
    assert re.search(rf"mpitrain: stall: 2 ranks waited [34] s for rank {rank} \(\S+\)", finished.stderr), (
        finished.output
    )
    others = ", ".join(rf"rank {other} \(\S+\)" for other in range(3) if other != rank)
    bucket = r"update of 2 gradients: bucket 1 of 1 \(40,400 bytes: dense/bias, dense/kernel\), after update 60"
    assert re.search(rf"waiting    {others} in {bucket}", finished.stderr), finished.output
    assert re.search(rf"not there  rank {rank} \(\S+\): .*is stopped by a signal", finished.stderr), finished.output
    (record,) = [json.loads(line) for line in report.read_text().splitlines()]
    assert (record["kind"], record["exit_code"], record["culprits"][0]["rank"]) == ("stall", 75, rank)


def test_a_rank_that_reads_for_ever_is_told_with_its_stack(mpirun: Mpirun) -> None:
    finished, seconds = finish(start(mpirun, 2, "load", "1", "60"), told=2)
    assert finished.returncode == 75, finished.output
    assert seconds < ABORT + 5, finished.output
    assert re.search(r"not there  rank 1 \(\S+\): phase compute, last update finished 60", finished.stderr)
    assert re.search(r"exchanging_program\.py:\d+ load_batch", finished.stderr), finished.output


@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("SIGKILL in a graph", 1, "was killed by SIGKILL|ended without a word"),
        ("raise in a graph", 0, "failed; the job ends"),
        ("SIGKILL", 1, "was killed by SIGKILL|ended without a word"),
        ("SIGKILL", 0, "was killed by SIGKILL|ended without a word"),
        ("SIGTERM", 1, "got SIGTERM; the job ends with exit code 143"),
        ("SIGTERM unseen", 1, "got SIGTERM; the job ends with exit code 143"),
        ("_exit", 1, "ended with exit code 4|ended without a word"),
        ("sys.exit", 1, r"called sys\.exit\(3\) while others went on"),
        ("raise", 1, "failed; the job ends"),
    ],
)
def test_a_rank_that_ends(mpirun: Mpirun, what: str, rank: int, words: str) -> None:
    in_graph, what = {"IN_GRAPH": "1"} if what.endswith(" in a graph") else {}, what.removesuffix(" in a graph")
    job = start(mpirun, 3, what, str(rank), "100", **in_graph)
    finished = job.finish(150)
    seconds = time.time() - float(re.findall(r"at (\d+\.\d+)", finished.stdout)[0])
    assert finished.returncode not in (0, 124), finished.output
    assert seconds < 5, finished.output
    told = re.findall(rf"^mpitrain: rank {rank} on \S+ (?:{words})", finished.stderr, re.MULTILINE)
    # MPICH kills the others within a few milliseconds of a rank's death, and names the signal itself.
    assert len(told) == 1 or (not mpirun.is_open_mpi and what in ("SIGKILL", "_exit") and not told), finished.output


def test_what_all_ranks_raise_is_told_once(mpirun: Mpirun) -> None:
    finished, seconds = finish(start(mpirun, 3, "all raise", "0", "100"))
    assert seconds < 5
    assert finished.stderr.count("ValueError: cause") == 1, finished.output
    assert re.search(r"^mpitrain: ranks 0, 1, 2 on \S+ failed; the job ends", finished.stderr, re.MULTILINE)


def test_a_caught_exit_and_a_slow_evaluation_are_no_faults(mpirun: Mpirun) -> None:
    finished, _ = finish(start(mpirun, 2, "caught exit", "1", "30"), told=0)
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("done") == 2


def test_an_interrupt_ends_all_ranks_once(mpirun: Mpirun) -> None:
    job = start(mpirun, 3, "nothing", "0", "100")
    while not (line := job.process.stdout.readline()).startswith("at "):  # type: ignore[union-attr]
        assert line, job.finish(10).output
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    finished, _ = finish(job, told=None)
    assert time.monotonic() - began < 10, finished.output
    assert finished.returncode != 0
    assert "Traceback" not in finished.stderr, finished.output
    # Open MPI ends the job without showing what its ranks still say.
    for line in TOLD.findall(finished.stderr):
        assert re.search(
            r"^mpitrain: ranks 0, 1, 2 on \S+ (got SIGTERM|failed; the job ends\ninterrupted)", finished.stderr
        ), line


def test_ranks_with_other_arguments_do_not_start(mpirun: Mpirun, tmp_path: Path) -> None:
    code = tmp_path / "script.py"
    code.write_text(
        "import os, sys\nif os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    sys.argv.append('--epochs=4')\n    os.environ['XLA_FLAGS'] = '--x'\n"
        "import mpitrain\nmpitrain.init(non_finite='stop' if len(sys.argv) > 1 else None)\nprint('started')\n"
    )
    env = {"PYTHONPATH": str(REPOSITORY)}
    finished = mpirun(2, [str(code)], env=env)
    assert finished.returncode == 2, finished.output
    assert finished.stderr.count("ranks do not run the same program:") == 1, finished.output
    assert re.search(r"arguments +- +--epochs=4", finished.stderr), finished.output
    assert re.search(r"variable XLA_FLAGS +- +--x", finished.stderr), finished.output
    assert re.search(r"--non-finite +warn +stop", finished.stderr), finished.output
    finished = mpirun(2, [str(code)], env={**env, "MPITRAIN_COMPARE_RANKS": "warn"})
    assert (finished.returncode, finished.stdout.count("started")) == (0, 2), finished.output
    assert finished.stderr.count("ranks do not run the same program:") == 1, finished.output
