"""Slurm on two hosts of our own: the batch file, and srun by hand."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import REPOSITORY, SHARED, Finished, Job, Mpirun
from tests.launch.hosts import Hosts, missing, several
from tests.launch.recovery_program import RECOVERY_PROGRAM, each_once, in_order, samples_taken

PROGRAM = str(Path(__file__).with_name("place_program.py"))
SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
WITHIN_SECONDS = 300
CONFIGURATION = """ClusterName=test
SlurmctldHost=node0
SlurmUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=node[0-1] CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES
"""
MUNGE = (
    "mkdir -p /run/munge /run/slurmd /run/slurmctld && munged --force --key-file={directory}/munge.key "
    "--socket=/run/munge/munge.socket.2 --pid-file=/run/munged.pid --log-file=/run/munged.log "
    "--seed-file=/run/munged.seed"
)


@pytest.fixture(scope="module", params=[SHARED])
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    absent = [program for program in SLURM if shutil.which(program) is None]
    reason = f"Slurm is not installed: {', '.join(absent)} (slurm-wlm, munge)" if absent else missing()
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "munge.key").write_bytes(os.urandom(1024))
    (directory / "munge.key").chmod(0o600)
    (directory / "slurm.conf").write_text(CONFIGURATION.format(cpus=os.cpu_count()))
    (directory / "mpi.conf").write_text("PMIxCliTmpDirBase=/run/tmp\n")  # /tmp is that of all hosts
    with several(2, directory) as hosts:
        for name in hosts.names:
            _on(hosts, name, "sh", "-c", MUNGE.format(directory=directory))
        _on(hosts, "node0", "slurmctld")
        for name in hosts.names:
            _on(hosts, name, "slurmd", "-N", name)
        deadline = time.monotonic() + 60
        while _on(hosts, "node0", "sinfo", "--noheader", "--format=%T %D").strip() != "idle 2":
            assert time.monotonic() < deadline, _on(hosts, "node0", "sinfo", "--long", "--Node")
            time.sleep(0.5)
        yield hosts


def _on(hosts: Hosts, name: str, *command: str) -> str:
    environ = {**os.environ, "SLURM_CONF": str(hosts.directory / "slurm.conf")}
    finished = subprocess.run(
        [*hosts.enter(name), *command], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0, f"{command}: {finished.stdout}{finished.stderr}"
    return finished.stdout


def started(cluster: Hosts, mpirun: Mpirun, *command: str) -> Job:
    environment = {
        **cluster.environment,
        "SLURM_CONF": str(cluster.directory / "slurm.conf"),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHON": sys.executable,
    }
    return mpirun.execute([*cluster.enter("node0"), *command], environment)


def submitted(cluster: Hosts, mpirun: Mpirun, *command: str) -> Finished:
    return started(cluster, mpirun, *command).finish(WITHIN_SECONDS)


def plugin(cluster: Hosts, mpirun: Mpirun) -> str:
    """Of Slurm's, the one that speaks with the MPI in use."""
    wanted = "pmix" if mpirun.is_open_mpi else "pmi2"
    shown = subprocess.run(
        [*cluster.enter("node0"), "srun", "--mpi=list"],
        env={**os.environ, "SLURM_CONF": str(cluster.directory / "slurm.conf")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if wanted not in (shown.stdout + shown.stderr).split():
        pytest.skip(f"this Slurm has no plugin {wanted} (libpmix-dev)")
    return wanted


def test_the_batch_file_trains_the_default_job(cluster: Hosts, mpirun: Mpirun, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ["--wait", f"--output={log}", str(REPOSITORY / "scripts" / "slurm.sbatch"), "--start-timeout", "120"]
    rank = ["--allow-run-as-root", "--show-plan", "--epochs", "1", "--output", str(tmp_path / "out")]
    finished = submitted(cluster, mpirun, "sbatch", *options, *rank)
    text = log.read_text() if log.exists() else ""
    assert finished.returncode == 0, finished.output + text
    assert "2 ranks on 2 hosts" in text
    accuracy = re.search(r"accuracy (0\.\d+)", text)
    assert accuracy is not None, text
    assert float(accuracy[1]) > 0.3
    assert re.findall(r"^(\d) +(\d) +(node\d) +(\d) +CPU", text, re.MULTILINE) == [
        ("0", "0", "node0", "0"),
        ("1", "1", "node1", "0"),
    ]


@pytest.mark.mpich
def test_srun_by_hand(cluster: Hosts, mpirun: Mpirun) -> None:
    command = ["srun", "--nodes=2", "--ntasks=2", f"--mpi={plugin(cluster, mpirun)}", sys.executable, PROGRAM]
    finished = submitted(cluster, mpirun, *command)
    assert finished.returncode == 0, finished.output
    lines = sorted(line.partition(",")[0] for line in finished.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.mpich
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_exit_codes_of_ranks_in_an_allocation(cluster: Hosts, mpirun: Mpirun, launcher: str) -> None:
    if launcher == "srun":
        plugin(cluster, mpirun)
    run = [sys.executable, "-m", "mpitrain", "run", "--launcher", launcher, "--allow-run-as-root", "--verbose"]
    finished = submitted(cluster, mpirun, "salloc", "--nodes=2", *run, sys.executable, PROGRAM, "exit", "5")
    assert finished.returncode == 5, finished.output
    assert f"{launcher} " in finished.stderr.partition("place_program")[0]
    assert "rank 0 of 2: node 0, local 0 on node0" in finished.stdout
    assert "rank 1 of 2: node 1, local 0 on node1" in finished.stdout


@pytest.mark.mpich
def test_a_job_of_srun_is_started_again(cluster: Hosts, mpirun: Mpirun, tmp_path: Path) -> None:
    plugin(cluster, mpirun)
    run = [sys.executable, "-m", "mpitrain", "run", "--launcher", "srun", "--start-timeout", "120", "--restarts", "2"]
    job = started(cluster, mpirun, "salloc", "--nodes=2", *run, sys.executable, RECOVERY_PROGRAM, str(tmp_path))
    steps, deadline = tmp_path / "steps-2-1", time.monotonic() + WITHIN_SECONDS
    while not (steps.exists() and steps.read_text().count("\n") >= 20) and time.monotonic() < deadline:
        time.sleep(0.05)
    before = samples_taken(tmp_path, 2)
    os.kill(_rank(job, 1), signal.SIGKILL)
    finished = job.finish(WITHIN_SECONDS)
    assert (finished.returncode, finished.stdout) == (0, "trained\n"), finished.output
    again = re.search(
        r"^mpitrain: the job failed (.*); restart 1 of 2 in 1 s, with 2 ranks, from the checkpoint of step (\d+)$",
        finished.stderr,
        re.MULTILINE,
    )
    assert again, finished.output
    after = samples_taken(tmp_path, 2)
    assert min(after) == int(again[2]) + 1
    assert in_order({**before, **after}) == each_once(), finished.output


def _rank(job: Job, rank: int) -> int:
    """The process that is a rank."""
    for pid in job.processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            program = RECOVERY_PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2]
            if program and f"SLURM_PROCID={rank}".encode() in environment:
                return pid
    raise AssertionError(f"there is no rank {rank}")
