"""The files in scripts/ for batch systems and containers: what their shells and readers would refuse."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.cli.run import OPTIONS, divide
from mpitrain.trainer.options import known

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"
# Options of each system's submission, and what their values look like, as far as the files use them.
TIME = r"(\d+:)?\d+:\d\d"
SBATCH = {
    "--job-name": r"[\w-]+",
    "--nodes": r"\d+",
    "--ntasks-per-node": r"\d+",
    "--output": r"[\w%/.-]+",
    "--signal": r"(B:)?(TERM|USR1)@\d+",
    "--gpus-per-task": r"\d+",
    "--cpus-per-task": r"\d+",
}
QSUB = {
    "-N": r"[\w-]+",
    "-l": rf"(select=\d+(:(ncpus|mpiprocs|ngpus)=\d+)*|place=scatter|walltime={TIME})",
    "-j": r"oe",
}
BSUB = {
    "-J": r"[\w-]+",
    "-n": r"\d+",
    "-R": r"span\[ptile=\d+\]",
    "-W": TIME,
    "-o": r"[\w%/.-]+",
    "-gpu": r"num=\d+:mode=exclusive_process",
}
FILES = {"slurm.sbatch": ("SBATCH", SBATCH), "pbs.sh": ("PBS", QSUB), "lsf.sh": ("BSUB", BSUB)}


def directives(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """Option and value of each directive before the first command, those that are commented out too."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            return
        match = re.fullmatch(rf"##?{mark} (.*)", line)
        if match:
            words = shlex.split(match[1].replace("=", " ", 1) if match[1].startswith("--") else match[1])
            assert len(words) == 2, f"{line!r} is no option with a value"
            yield words[0], words[1]


def wrong(text: str, mark: str, known: dict[str, str]) -> list[str]:
    """The directives that the batch system would refuse."""
    found = list(directives(text, mark))
    assert found, "no directives"
    return [f"{name} {value}" for name, value in found if not re.fullmatch(known.get(name, "(?!)"), value)]


def shell_errors(text: str, shell: str = "bash") -> str:
    return subprocess.run([shell, "-n"], input=text, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("name", FILES)
def test_directives(name: str) -> None:
    mark, known = FILES[name]
    text = (SCRIPTS / name).read_text()
    assert text.startswith("#!/bin/bash\n")
    assert wrong(text, mark, known) == []
    assert {option for option, _ in directives(text, mark)} == set(known)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("slurm.sbatch", "--nodes=2", "--node=2"),
        ("slurm.sbatch", "TERM@60", "TERM:60"),
        ("pbs.sh", "ncpus=4:mpiprocs", "ncpus=4;mpiprocs"),
        ("lsf.sh", "-W 1:00", "-W 1h"),
    ],
)
def test_that_mistakes_are_seen(name: str, before: str, after: str) -> None:
    mark, known = FILES[name]
    assert wrong((SCRIPTS / name).read_text().replace(before, after, 1), mark, known) != []


@pytest.mark.parametrize("name", [*FILES, "setup", "test", "train"])
def test_the_shell_reads_them(name: str) -> None:
    text = (SCRIPTS / name).read_text()
    assert shell_errors(text) == ""
    assert shell_errors(text + "\nif true; then\n") != ""


@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("slurm.sbatch", {}, ["a b.py", "--x"]),
        ("pbs.sh", {"ARGUMENTS": "a.py  --x *"}, ["a.py", "--x", "*"]),
        ("lsf.sh", {"ARGUMENTS": "a.py --x $HOME"}, ["a.py", "--x", "$HOME"]),
        ("pbs.sh", {}, []),
    ],
)
def test_what_they_start(tmp_path: Path, name: str, variables: dict[str, str], words: list[str]) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    arguments = words if name == "slurm.sbatch" else []
    started = subprocess.run(
        ["bash", str(SCRIPTS / name), *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert started.stdout.splitlines() == ["-m", "mpitrain", "run", *words]


def manifest() -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra test)")
    return yaml.safe_load((SCRIPTS / "mpijob.yaml").read_text())


def test_mpi_job() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert set(spec) == {
        "slotsPerWorker",
        "mpiImplementation",
        "launcherCreationPolicy",
        "runPolicy",
        "mpiReplicaSpecs",
    }
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "mpitrain"
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
    command = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["mpitrain", "run"]
    assert divide(command[2:]) == (command[2:], [])


def test_yaml_mistakes_are_seen() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra test)")
    text = (SCRIPTS / "mpijob.yaml").read_text()
    with pytest.raises(yaml.YAMLError):
        yaml.safe_load(text.replace("command: [mpitrain, run", "command: [mpitrain, run: [", 1))


def instructions(text: str) -> list[tuple[str, str]]:
    """Instruction and arguments of each line of a container file, lines that go on joined."""
    joined = re.sub(r"\\\n", " ", "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("#")))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name]


def test_container_file() -> None:
    found = instructions((SCRIPTS / "Containerfile").read_text())
    names = [name for name, _ in found]
    assert names[0] == "FROM"
    assert set(names) == {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "CMD"}
    for name, rest in found:
        if name == "RUN":
            assert shell_errors(rest, "sh") == ""
        if name == "COPY":
            *sources, _ = rest.split()
            assert [source for source in sources if not (REPOSITORY / source).exists()] == []


def test_options_of_run_are_none_of_the_training_job() -> None:
    """What stands behind `mpitrain run` belongs to it as far as it knows the option.

    Of failures both have to know, and `run` hands on what it was told.
    """
    of_run = {flag for flags, _ in OPTIONS for flag in flags}
    assert {one.flag for one in known().values()} & of_run == {"--verbose", "--on-failure", "--min-np"}
