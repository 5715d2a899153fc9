"""What other users can do to a job, or see of it: nothing. Shells and ssh are in `test_launch_ssh.py`."""

from __future__ import annotations

import ast
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint.files import Snapshot
from mpitrain.checkpoint.output import prepare_directory
from mpitrain.checkpoint.store import Store
from mpitrain.cluster.jobs import Cluster
from mpitrain.cluster.record import Record
from mpitrain.comm.all_reduce import AllReduce
from mpitrain.comm.local import LocalCommunicator
from mpitrain.errors import UsageError
from mpitrain.faults import report
from mpitrain.launch.commands import build_srun
from mpitrain.launch.daemonless.starter import keeper_words
from mpitrain.launch.dialect import Mpi
from mpitrain.launch.job import LaunchJob
from mpitrain.launch.request import Request
from mpitrain.launch.ssh import Ssh
from mpitrain.launch.ssh_program import SshProgram
from mpitrain.runtime import cache
from mpitrain.runtime.hostfile import Host
from mpitrain.runtime.marks import RUN_VARIABLE

PACKAGE = Path(__file__).resolve().parents[2] / "mpitrain"
UNPICKLING = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
# Calls that run text as code, or hand it to a shell, and where one has to.
RUNNING = {"eval", "exec", "system", "popen", "getoutput", "getstatusoutput"}
ALLOWED = {("exec", "scripts/script.py")}  # the user's own script


def nodes(path: Path) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(path.read_text()))


def test_nothing_is_unpickled() -> None:
    """Objects travel pickled between the ranks of one job, by mpi4py; nothing that lies on a disk is unpickled."""
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if path.name != "delegation.py":  # its own bytes, in memory: what of an error is left when it has travelled
                assert not UNPICKLING & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
                assert "allow_pickle=False" in ast.unparse(node), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "keras.models.load_model":
                assert "safe_mode=True" in ast.unparse(node) or path.parent.name == "horovod", path


def test_nothing_goes_through_a_shell() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in RUNNING or called.rpartition(".")[2] in RUNNING - {"eval", "exec"}:
                    found.add((called, path.relative_to(PACKAGE).as_posix()))
                assert "shell=True" not in ast.unparse(node), path
    assert found == ALLOWED


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A user who hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_with_data_are_not_for_everyone(tmp_path: Path, open_umask: None) -> None:
    prepare_directory(tmp_path / "output")
    store = Store(tmp_path / "checkpoints")
    store.prepare()
    written = store.write(Snapshot({}), Path.touch)
    report.write(str(tmp_path / "faults.json"), report.Fault("death", "", 1))
    made = [*tmp_path.iterdir(), written, *written.iterdir()]
    assert len(made) == 7, made
    assert {path.name: path.stat().st_mode for path in made if path.stat().st_mode & 0o007} == {}
    with SshProgram(Ssh()) as agent:
        assert [path.stat().st_mode & 0o077 for path in (agent.path, agent.path.parent)] == [0, 0]


@given(st.binary() | st.text().map(str.encode))
def test_what_others_left_in_a_cache_is_read_as_text(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    cache = tmp_path_factory.getbasetemp() / "cache"
    engine = AllReduce(LocalCommunicator(), "layout", {"XDG_CACHE_HOME": str(cache)})
    engine._cache.parent.mkdir(parents=True, exist_ok=True)
    engine._cache.write_bytes(content)
    assert engine._read() is None


def test_small_files_lie_in_the_user_s_home_and_never_where_all_may_write(tmp_path: Path) -> None:
    assert cache.directory({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/mpitrain")
    assert cache.directory({"HOME": "/h"}) == Path("/h/.cache/mpitrain")
    home = pwd.getpwuid(os.geteuid()).pw_dir
    assert cache.directory({}) == cache.directory({"HOME": ""}) == Path(home, ".cache/mpitrain")
    record = Record.named("default", {"HOME": str(tmp_path)})
    record.write(Cluster({"worker": ("127.0.0.1:1",)}))
    assert [path.stat().st_mode & 0o077 for path in (record.path, record.path.parent)] == [0, 0]
    assert record.read().as_dict() == {"worker": ["127.0.0.1:1"]}
    for path in (record.path, record.path.parent):
        before = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(UsageError, match="others than you may have written it"):
            record.read()
        path.chmod(before)
    if os.geteuid() == 0:
        os.chown(record.path, 65534, 65534)
        with pytest.raises(UsageError, match="others than you may have written it"):
            record.read()


def test_no_secret_is_on_a_command_line() -> None:
    """All users can see the arguments of all processes; variables are their owner's alone."""
    ssh = Ssh(("ssh",), identity_file="/k")
    for mpi in (
        Mpi("Open MPI", (5, 0, 1)),
        Mpi("Open MPI", (4, 1, 4)),
        Mpi("MPICH", (4, 0)),
        Mpi("Intel MPI", (2021,)),
    ):
        for hosts in ((), (Host("a", 1), Host("b", 1))):
            request = Request(("true",), 2, hosts, environment={"KEY": "s3cret", RUN_VARIABLE: "t0ken"})
            for daemonless in (False, True):
                command = LaunchJob(request, mpi, "mpirun", daemonless=daemonless).command({}, "/t/ssh", ssh.line)
                assert "s3cret" not in " ".join(command.argv)
                assert "t0ken" not in " ".join(command.argv)
                assert command.environment["KEY"] == "s3cret"
    srun = build_srun(request, Mpi("MPICH", (4, 0)), "pmi2", {})
    assert "s3cret" not in " ".join(srun.argv)
    assert "s3cret" not in " ".join(keeper_words())
