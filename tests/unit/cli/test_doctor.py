"""The command: what it takes, what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli import doctor
from mpitrain.cli.main import main
from mpitrain.doctor.finding import Finding
from mpitrain.doctor.job import PlannedJob
from mpitrain.runtime.hostfile import Host

FINE = Finding("clock", ("a", "b"), "green", "within 1 s of the others")
SLOW = Finding("link", ("a", "b", "c", "d", "e", "f"), "yellow", "slow: 3 Mbit/s", "ip -s link")
WRONG = Finding("ssh", ("b",), "red", "the name does not resolve", "getent hosts b")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[PlannedJob]:
    """The jobs that are examined; what is found depends on their number of ranks."""
    seen: list[PlannedJob] = []

    def examine(job: PlannedJob, tell: Any) -> tuple[Finding, ...]:
        seen.append(job)
        tell("asking")
        return ((FINE, SLOW), (FINE, SLOW, WRONG))[job.ranks == 3]

    monkeypatch.setattr(doctor, "examine", examine)
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_lines_and_exit_codes(jobs: list[PlannedJob], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-H", "a:2,b"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "green  clock          all 2: within 1 s of the others"
    assert lines[1] == "yellow link           all 6: slow: 3 Mbit/s; mend: ip -s link"
    assert lines[2] == "red    ssh            b: the name does not resolve; mend: getent hosts b"
    assert lines[3].startswith("1 red, 1 yellow, 1 green; 2 hosts, ")
    assert err == "mpitrain doctor: asking\n"
    assert main(["doctor", "-H", "a:2,b", "-np", "2"]) == 0
    assert [job.ranks for job in jobs] == [3, 2]
    assert jobs[0].hosts == (Host("a", 2), Host("b"))


def test_json(jobs: list[PlannedJob], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=3\n")
    assert main(["doctor", "--hostfile", str(hostfile), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["colour"] == "red"
    assert told["seconds"] >= 0
    expected = {"check": "ssh", "hosts": ["b"], "colour": "red"}
    assert told["findings"][2] == {**expected, "sentence": WRONG.sentence, "remedy": WRONG.remedy}


def test_the_hosts_of_a_batch_job(jobs: list[PlannedJob], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "TASKS_PER_NODE": "2(x2)", "NTASKS": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["doctor"]) == 1
    assert (jobs[0].hosts, jobs[0].ranks) == ((Host("n1", 2), Host("n2", 2)), 3)
    assert main(["doctor", "-H", "x:5"]) == 0
    assert (jobs[1].hosts, jobs[1].ranks) == ((Host("x", 5),), 5)
    assert main(["doctor", "-H", "n2"]) == 0
    assert [job.allocation is not None for job in jobs] == [True, False, True]


def test_this_host_alone(jobs: list[PlannedJob]) -> None:
    main(["doctor", "-np", "7"])
    assert [host.name for host in jobs[0].hosts] == ["localhost"]
    assert jobs[0].hosts[0].slots >= 1
    assert jobs[0].ranks == 7


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-H", "a:x"], "slots must be a whole number above 0"),
        (["--hostfile", "/no/such/file"], "cannot be read"),
        (["-H", "a", "--hostfile", "b"], "give one of them"),
        (["-np", "0", "-H", "a"], "-np/-n/--num-proc is 0: it must be at least 1"),
        (["-np", "x"], "-np/-n/--num-proc is 'x': give a whole number"),
        (["-H", "a", "surplus"], "unrecognized arguments: surplus"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], complaint: str, jobs: list[PlannedJob], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert jobs == []


def test_ranks_of_a_job_are_sent_away(
    jobs: list[PlannedJob], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    assert main(["doctor"]) == 2
    assert "run it alone, without Open MPI's mpirun" in capsys.readouterr().err
    assert jobs == []


def test_many_hosts_are_counted() -> None:
    assert doctor._where(SLOW, ["z"]) == "a, b, c, d and 2 more"
    assert doctor._where(FINE, ["a", "b", "c"]) == "a, b"


def test_the_table_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    doctor._print_table([FINE, WRONG], ["a", "b"])
    out = capsys.readouterr().out
    assert [word in out for word in ("all 2", "within 1 s", "mend: getent hosts b")] == [True] * 3
