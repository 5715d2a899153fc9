"""The command line of `mpitrain run`: whose words are whose, and what it prints without starting anything."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.cli.main import COMMANDS, main
from mpitrain.cli.run import divide, origin
from mpitrain.errors import LauncherError, UsageError
from mpitrain.launch import dialect
from mpitrain.launch.allocation import Allocation
from mpitrain.launch.dialect import INTEL_MPI, MPICH, OPEN_MPI, Mpi
from mpitrain.launch.job import OURS, LaunchJob, Srun, choose_srun, rank_command, reached_by_ssh
from mpitrain.launch.request import Request
from mpitrain.runtime.hostfile import Host

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("", 0),
        ("-np 4", 2),
        ("-np 4 train.py -np 5", 2),
        ("-np 4 --epochs 3", 2),
        ("--hosts=a:4 --verbose --dry-run script.py --dry-run", 3),
        ("-np 4 -m package", 2),
        ("-x A=b -x C train", 4),
        ("--help", 1),
    ],
)
def test_whose_words(words: str, own: int) -> None:
    assert divide(words.split()) == (words.split()[:own], words.split()[own:])


def test_a_dash_dash_divides() -> None:
    assert divide(["-np", "4", "--", "--dry-run", "a.py"]) == (["-np", "4"], ["--dry-run", "a.py"])
    assert divide(["--", "--"]) == ([], ["--"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [*OURS]),
        (["a.py", "b c"], [*OURS, "a.py", "b c"]),
        (["-m", "a"], [*OURS, "-m", "a"]),
        (["--epochs", "3"], [*OURS, "--epochs", "3"]),
        (["train", "--epochs", "3"], [*OURS, "train", "--epochs", "3"]),
        (["sh", "-c", "x"], ["sh", "-c", "x"]),
    ],
)
def test_what_ranks_execute(words: list[str], expected: list[str]) -> None:
    assert rank_command(words) == tuple(expected)


@pytest.mark.parametrize("word", ["hosts", "nosuchprogram", "run", "./absent"])
def test_what_ranks_cannot_execute(word: str) -> None:
    with pytest.raises(UsageError, match=r"no script.*no program"):
        rank_command([word])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--epochs 3", "it begins anew; with --checkpoint-dir"),
        ("--checkpoint-dir D --epochs 3", "from the last checkpoint in D"),
        ("train --checkpoint-dir=D", "from the last checkpoint in D"),
        ("--config {}/a.toml", "from the last checkpoint in E"),
        ("--config {}/a.toml --checkpoint-dir D", "from the last checkpoint in D"),
        ("--config {}/absent.toml", "it begins anew"),
        ("--checkpoint-dir", "it begins anew"),
        ("--device cpu train.py --checkpoint-dir D", "the script begins where its own BackupAndRestore lets it"),
        ("-m package", "the script begins where its own BackupAndRestore lets it"),
        ("sh train.sh", "from the newest of its checkpoints, where it makes some"),
    ],
)
def test_where_a_restarted_job_begins(tmp_path: Path, words: str, expected: str) -> None:
    (tmp_path / "a.toml").write_text('checkpoint_dir = "E"\n')
    rest = words.format(tmp_path).split()
    job = LaunchJob(Request(rank_command(rest), 2), Mpi(OPEN_MPI), "mpirun")
    assert origin(job, rest).startswith(expected)


def slurm(tmp_path: Path, plugins: str) -> dict[str, str]:
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\nprintf 'MPI plugin types are...\\n\\tnone\\n{plugins}' >&2\n")
    srun.chmod(0o755)
    return {"PATH": str(tmp_path)}


SLURM, PBS = Allocation("Slurm", (Host("a"),)), Allocation("PBS", (Host("a"),))


@pytest.mark.parametrize(
    ("wanted", "mpi", "allocation", "plugins", "plugin"),
    [
        ("auto", OPEN_MPI, SLURM, "\\tpmi2\\n\\tpmix\\n", "pmix"),
        ("auto", OPEN_MPI, SLURM, "\\tpmi2\\n", None),
        ("auto", MPICH, SLURM, "\\tpmi2\\n\\tpmix\\n", "pmi2"),
        ("auto", MPICH, SLURM, "\\tpmix\\n", "pmix"),
        ("auto", INTEL_MPI, SLURM, "\\tpmi2\\n", None),
        ("srun", INTEL_MPI, SLURM, "\\tpmi2\\n", "pmi2"),
        ("mpirun", OPEN_MPI, SLURM, "\\tpmix\\n", None),
        ("auto", OPEN_MPI, PBS, "\\tpmix\\n", None),
        ("auto", OPEN_MPI, None, "\\tpmix\\n", None),
    ],
)
def test_whether_srun_starts_the_ranks(
    tmp_path: Path, wanted: str, mpi: str, allocation: Allocation | None, plugins: str, plugin: str | None
) -> None:
    chosen = choose_srun(wanted, allocation, Mpi(mpi), slurm(tmp_path, plugins))
    assert chosen == (None if plugin is None else Srun(str(tmp_path / "srun"), plugin))


@pytest.mark.parametrize(
    ("mpi", "allocation", "reason"),
    [
        (OPEN_MPI, SLURM, "needs one of the plugins pmix, and srun --mpi=list shows .*pmi2"),
        (MPICH, None, "there is no allocation"),
    ],
)
def test_srun_that_cannot(tmp_path: Path, mpi: str, allocation: Allocation | None, reason: str) -> None:
    with pytest.raises(LauncherError, match=reason):
        choose_srun("srun", allocation, Mpi(mpi), slurm(tmp_path, "\\tpmi2\\n"))
    with pytest.raises(LauncherError, match="no srun on PATH"):
        choose_srun("srun", SLURM, Mpi(mpi), {"PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("mpi", "allocation", "environ", "by_ssh"),
    [
        (OPEN_MPI, SLURM, {}, True),  # if it has no way of its own
        (MPICH, None, {}, True),
        (MPICH, PBS, {}, True),
        (MPICH, SLURM, {}, False),
        (MPICH, SLURM, {"HYDRA_LAUNCHER_EXEC": "/my/ssh"}, True),
        (MPICH, SLURM, {"HYDRA_LAUNCHER": "ssh"}, True),
        (INTEL_MPI, SLURM, {}, False),
        (INTEL_MPI, SLURM, {"I_MPI_HYDRA_BOOTSTRAP": "ssh"}, True),
    ],
)
def test_who_comes_by_ssh(mpi: str, allocation: Allocation | None, environ: dict[str, str], by_ssh: bool) -> None:
    assert reached_by_ssh(Mpi(mpi), allocation, environ) == by_ssh


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PBS_", "LSB_"))}
    return subprocess.run(
        [sys.executable, "-m", "mpitrain", "run", *words],
        env={**kept, "PYTHONPATH": str(REPOSITORY), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_dry_run(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\nb slots=2\n")
    options = ["--allow-run-as-root", "--hostfile", str(hostfile), "-x", "SEED=1 2"]
    shown = command(*options, "--dry-run", "a b.py", "--x")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "a:2,b:2" in shown.stdout
    assert "'SEED=1 2'" in shown.stdout
    assert shown.stdout.endswith(f"{sys.executable} -m mpitrain 'a b.py' --x\n")
    assert "MPITRAIN_RUN" not in shown.stdout


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_no_failure(closed: str, tmp_path: Path) -> None:
    words = f"{sys.executable} -m mpitrain run --allow-run-as-root -np 1 --dry-run hostname"
    shown = subprocess.run(
        ["/bin/sh", "-c", f"{words} {closed}"], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith("hostname\n" if "1>" not in closed else "")


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone = ["/bin/sh", "-c", 'cd gone; rmdir ../gone; exec "$@"', "sh"]
    for words in (["script.py"], ["-m", "json"], ["run", "-np", "1"], ["doctor"], ["--epochs", "3"]):
        told = subprocess.run(
            [*gone, sys.executable, "-m", "mpitrain", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        (tmp_path / "gone").mkdir()
        assert (told.returncode, told.stdout) == (2, "")
        assert told.stderr == (
            "mpitrain: the working directory is gone (No such file or directory): change to one that exists\n"
        )


def test_a_job_without_a_home_has_that_of_the_account() -> None:
    found = dialect.path_beside("/opt/mpi/bin/mpirun", {"PATH": "/bin"})
    assert found == {"HOME": pwd.getpwuid(os.geteuid()).pw_dir, "PATH": "/opt/mpi/bin:/bin"}
    assert dialect.path_beside("/bin/mpirun", {"HOME": "/h", "PATH": "/bin"}) == {"HOME": "/h", "PATH": "/bin"}


def test_names_are_shown_whatever_the_encoding_of_the_terminal() -> None:
    shown = command("--allow-run-as-root", "-np", "1", "--dry-run", "fußball.py", PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.endswith(f"{sys.executable} -m mpitrain 'fu\\xdfball.py'\n")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--allow-run-as-root"], "how many ranks?"),
        (["--as-horovod", "-np", "2", "x.py"], "how many ranks? Give them before what is to be run"),
        (["-H", "localhost:2", "--as-horovod", "-np", "2", "x.py"], "-np stands before --as-horovod, which is for the"),
        (["-np", "x"], "-np/-n/--num-proc is 'x': give a whole number"),
        (["-np", "1", "--start-timeout", "0"], "0 is no time"),
        (["-np", "1", "--kill-after", "nan"], "nan is no time"),
        (["-np", "1", "--kill-after", "soon"], "invalid seconds value: 'soon'"),
        (["-np", "2", "-H", "a", "--hostfile", "b"], "give one of them"),
        (["-np", "2", "--hostfile", "/nowhere"], "/nowhere cannot be read"),
        (["-np", "1", "-H", "-oProxyCommand=x"], "expected one argument"),
        (["-np", "1", "-H=-oProxyCommand"], "-H:1: '-oProxyCommand' is no name of a host"),
        (["-np", "1", "-H", "a;b"], "'a;b' is no name of a host"),
        (["-np", "1", "--mpirun", "/nowhere/mpirun"], "/nowhere/mpirun is no program"),
        (["-np", "1", "--allow-run-as-root", "nosuchprogram"], "no program"),
        (["-np", "1", "--allow-run-as-root", "--mpi-args", "'a"], "cannot be split"),
        (["-np", "1", "--allow-run-as-root", "-x", "NOT_SET_HERE"], "the variable is not set here"),
        (["-np", "1", "-H", "a", "--allow-run-as-root", "-p", "0"], "ssh port is 0"),
        (["-np", "1", "--allow-run-as-root", "--network-interfaces", "eth0;x"], "no network interface"),
        (["-np", "1", "--allow-run-as-root", "--survive", "hosts"], "add --on-failure shrink"),
    ],
)
def test_bad_input_is_told_in_one_sentence(words: list[str], complaint: str) -> None:
    finished = command(*words, "--dry-run")
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith("mpitrain: ")
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert complaint in finished.stderr


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from mpitrain.cli.main import main; "
        "code = main(['run', '-np', '1', '--allow-run-as-root', '--dry-run']); "
        "print([name for name in ('numpy', 'mpi4py', 'tensorflow', 'keras') if name in sys.modules], code)"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    finished = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epocs", "3"], "unrecognized arguments: --epocs 3 (did you mean --epochs?); see mpitrain --help"),
        (["--oversubcribe", "t.py"], "unrecognized arguments: --oversubcribe (did you mean --oversubscribe?)"),
        (["--tag-outputs"], "unrecognized arguments: --tag-outputs (did you mean --tag-output?); see mpitrain --help"),
        (["bench", "exchange", "--repeet", "3"], "unrecognized arguments: --repeet 3 (did you mean --repeat?); see"),
        (["--network-interfaces", "nope0"], "--network-interfaces nope0: this host has no such interface, but "),
        (["--hostfile", "/no/such"], "the hostfile /no/such cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_starts_nothing(words: list[str], told: str) -> None:
    command = [sys.executable, "-m", "mpitrain", "run", "-np", "1", "--allow-run-as-root", *words]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"mpitrain: {told}")


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["--dry-run", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        shown = " ".join(capsys.readouterr().out.split())
        for command in COMMANDS:
            assert f" {command} {COMMANDS[command]}" in shown
