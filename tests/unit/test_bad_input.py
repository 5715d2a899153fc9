"""Wrong input of every kind: one clear sentence, exit code 2, no traceback, nothing lost; and nothing is loaded for it.

Cases that need TensorFlow, or several ranks, are in `tests/launch/test_bad_input.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.config import read_file
from mpitrain.errors import UsageError
from mpitrain.launch import allocation
from mpitrain.runtime.devices import parse_memory
from mpitrain.runtime.hostfile import parse, read
from mpitrain.runtime.launcher import slurm_counts
from mpitrain.trainer.options import merge

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "tests" / "launch" / "bad_input_program.py"
SEE = "; see mpitrain"
SLURM = "SLURM_JOB_ID=7 SLURM_JOB_NODELIST={} SLURM_JOB_CPUS_PER_NODE={}"

# A command line, {dir} for the directory of files, and what the sentence holds.
OPTIONS = {
    "--epoch 3": f"unrecognized arguments: --epoch 3 (did you mean --epochs?){SEE} --help",
    "tran": f"unrecognized arguments: tran (did you mean train?){SEE} --help",
    "doctr": f"unrecognized arguments: doctr (did you mean doctor?){SEE} --help",
    "--batchsize=3": f"unrecognized arguments: --batchsize=3 (did you mean --batch-size?){SEE} --help",
    "--epochs 3 train.py": "--epochs is an option of the training that mpitrain has built in, and does not stand",
    "--epochs=3 train.py": f"stands behind it, as in `mpitrain train.py --epochs ...`{SEE} --help",
    "--epochs=3 python -u x.py": "as in `mpitrain x.py --epochs ...`",
    "--epochs=3 -m x": "as in `mpitrain -m x --epochs ...`",
    "--epochs 3 -m x": "as in `mpitrain -m x --epochs ...`",
    "--config=x.toml x.py": "--config is an option of the training that mpitrain has built in, and does not",
    "--divide-loops --epochs=3 x.py": "--epochs is an option of the training that mpitrain has built in, and does not",
    "train --epochs=3 x.py": "--epochs is an option of the training that mpitrain has built in, and does not",
    "train --divide-loops x.py": "a script runs without the word train: `mpitrain --divide-loops x.py ...`; see",
    "--epoch=3 x.py": f"unrecognized arguments: --epoch=3{SEE} --help",
    "--divide-loops --epochs 3 x.py": "--epochs is an option of the training that mpitrain has built in, and does not",
    "--divide-lops x.py": f"unrecognized arguments: --divide-lops (did you mean --divide-loops?){SEE} --help",
    "--as-horovod -np 2 x.py": f"unrecognized arguments: -np{SEE} --help",
    "{dir}/binary": "is no script, whose name ends in .py; a module or package is run with -m, data with --data",
    "x x.py": f"unrecognized arguments: x x.py{SEE} --help",
    "--epochs": f"argument --epochs: expected one argument{SEE} --help",
    "--epochs x": "--epochs is 'x': give a whole number",
    "--epochs 0": "--epochs is 0: it must be at least 1",
    "--epochs -1": "--epochs is -1: it must be at least 1",
    "--epochs 1e3": "--epochs is '1e3': give a whole number",
    "--epochs 9999999999999999999999": "--epochs is 9999999999999999999999: it must be below 1e+09",
    "--batch-size 0": "--batch-size is 0: it must be at least 1",
    "--batch-size 2.5": "--batch-size is '2.5': give a whole number",
    "--learning-rate 0": "--learning-rate is 0.0: it must be above 0",
    "--learning-rate nan": "--learning-rate is nan: give a finite number",
    "--learning-rate 1e999": "--learning-rate is inf: give a finite number",
    "--learning-rate fast": "--learning-rate is 'fast': give a number",
    "--optimizer best": "--optimizer is 'best': choose one of adadelta, ",
    "--lr-scaling cubic": "--lr-scaling is 'cubic': choose one of none, linear, sqrt",
    "--lr-decay cubic": "--lr-decay is 'cubic': choose one of none, cosine",
    "--precision float8": "--precision is 'float8': choose one of float32, ",
    "--seed -1": "--seed is -1: it must be at least 0",
    "--seed 4294967296": "--seed is 4294967296: it must be below ",
    "--validation-split 1": "--validation-split is 1.0: it must be below 1",
    "--validation-split nan": "--validation-split is nan: give a finite number",
    "--classes 1": "--classes is 1: it must be at least 2",
    "--task guess": "--task is 'guess': choose one of ",
    "--image-size 224": "--image-size is '224': write it as in 224x224",
    "--image-size 999999x1": "--image-size is '999999x1': write it as in 224x224",
    "--checkpoint-every 0steps": "--checkpoint-every is '0steps': write it epoch, or as in 500steps or 10min",
    "--checkpoint-every 5weeks": "--checkpoint-every is '5weeks': write it ",
    "--checkpoint-keep 0": "--checkpoint-keep is 0: it must be at least 1",
    "--grace 0": "--grace is 0.0: it must be above 0",
    "--grace 1e9": "--grace is 1000000000.0: it must be below 86400",
    "--stall-warning -1": "--stall-warning is -1.0: it must be at least 0",
    "--stall-abort soon": "--stall-abort is 'soon': give a number",
    "--non-finite cry": "--non-finite is 'cry': choose one of stop, warn, ignore",
    "--strategy ps --loss-is sum x.py": "--loss-is: parameter servers average gradients, weighted by rows: leave it ",
    "--loss-is median x.py": "--loss-is is 'median': choose one of mean, sum, whole",
    "--verify-replicas -1": "--verify-replicas is -1: it must be at least 0",
    "--device tpu": "--device is 'tpu': choose one of auto, cpu, gpu",
    "--intra-threads 0": "--intra-threads is 0: it must be at least 1",
    "--inter-threads 1000000": "--inter-threads is 1000000: it must be below 10000",
    "--share-gpus=yes": "ignored explicit argument 'yes'",
    "--data ''": "--data is empty: leave it out, or give a value",
    "--output {dir}/empty": "nothing can be saved in {dir}/empty (",
    "--output /dev/null/x": "nothing can be saved in /dev/null/x (Not a directory)",
    "--batch-size-is half x.py": "--batch-size-is is 'half': choose one of rank, global",
    "--dry-run=yes x.py": "ignored explicit argument 'yes'",
    "--stall-warning x x.py": "--stall-warning is 'x': give a number of seconds",
    "--intra-threads 0 x.py": "--intra-threads is 0: it must be at least 1",
    "--stall-abort nan x.py": "--stall-abort is nan: give a finite number",
    "--intra-threads x x.py": "--intra-threads is 'x': give a whole number",
    "{dir}/none.py": "the script {dir}/none.py cannot be read: No such file or directory",
    "-m": "there is no module ''",
    "-m no.such.module": "there is no module 'no.such.module' that -m could run",
    "-m json.no": "there is no module 'json.no'",
    "-m xml": "there is no module 'xml'",
    "-m 1x": "there is no module '1x'",
    "bench": f"the following arguments are required: NAME{SEE} bench --help",
    "bench none": "argument NAME: invalid choice: 'none'",
    "bench step --repeat 0": "argument --repeat: '0' is no positive whole number",
    "bench step --models vgg": "argument --models: there is no model 'vgg'",
    "bench exchange --mebibytes 1,x": "argument --mebibytes: 'x' is no positive number",
    "bench exchange --rate inf": "argument --rate: 'inf' is no positive number",
    "bench step --json {dir}/empty/x.json": "--json {dir}/empty/x.json cannot be written (",
    "bench start --mpirun no-such-mpirun": "no-such-mpirun cannot be run",
    "doctor -np 0": "-np/-n/--num-proc is 0: it must be at least 1",
    "doctor -np x": "-np/-n/--num-proc is 'x': give a whole number",
    "doctor -H 'a;b'": "-H:1: 'a;b' is no name of a host",
    "doctor -H a --hostfile b": "hosts are given with -H and with --hostfile: give one of them",
}
FILES = {
    "--config {dir}/none": "the configuration {dir}/none cannot be read (No such file or directory)",
    "--config {dir}": "the configuration {dir} cannot be read (Is a directory)",
    **{
        f"--config {{dir}}/{name}.toml": sentence
        for name, sentence in {
            "unknown": "there is no option 'epoch' in {dir}/unknown.toml: did you mean epochs?",
            "latin": "latin.toml is not TOML ('utf-8' codec can't decode",
            "nul": "nul.toml is not TOML (",
            "twice": "twice.toml is not TOML (",
            "deep": "deep.toml is not TOML (",
            "table": "epochs in {dir}/table.toml is {'a': 1}: give a whole number",
            "list": "epochs in {dir}/list.toml is [1]: give a whole number",
            "date": "epochs in {dir}/date.toml is datetime.date(2020, 1, 1): give a whole number",
            "huge": "epochs in {dir}/huge.toml is 99999999999999999999: it must be below 1e+09",
            "nan": "learning-rate in {dir}/nan.toml is nan: give a finite number",
            "flag": "share-gpus in {dir}/flag.toml is 1: give true or false",
            "words": "epochs in {dir}/words.toml is 'three': give a whole number",
            "path": "output in {dir}/path.toml is 'a\\x00b': leave the NUL character out",
        }.items()
    },
    "hosts": f"the following arguments are required: VERB{SEE} hosts --help",
    "hosts convert {dir}/none": "{dir}/none cannot be read: ",
    "hosts convert {dir}": "{dir} cannot be read: ",
    "hosts convert {dir}/binary": "{dir}/binary cannot be read: it is no text in UTF-8 (",
    "hosts convert {dir}/empty": "{dir}/empty names no host",
    "hosts convert {dir}/empty --to pbs": "argument --to: invalid choice: 'pbs'",
    "hosts convert {dir}/slots": "{dir}/slots:2: slots must be a whole number above 0, not '0'",
    "hosts convert {dir}/shell": "{dir}/shell:1: '$(id)' is no name of a host",
    "doctor --hostfile {dir}/none": "{dir}/none cannot be read: ",
}
RUN = {
    "run": "how many ranks?",
    "run -np": "argument -np/-n/--num-proc: expected one argument",
    "run -np 0": "-np/-n/--num-proc is 0: it must be at least 1",
    "run -np 1.5": "-np/-n/--num-proc is '1.5': give a whole number",
    "run -np 100000": "100000 ranks are more than there are slots",
    "run -np 2 -H 'a;b:2'": "-H:1: 'a;b' is no name of a host",
    "run -np 2 --hosts=-oProxyCommand:2": "-H:1: '-oProxyCommand' is no name of a host",
    "run -np 2 -H a:-1": "-H:1: slots must be a whole number above 0, not '-1'",
    "run -np 3 -H a:1,b:1": "3 ranks are more than there are slots, 2 (a 1, b 1)",
    "run -np 2 -H a:2 --hostfile x": "hosts are given with -H and with --hostfile: give one of them",
    "run -np 2 --hostfile {dir}/none": "{dir}/none cannot be read: ",
    "run -np 2 --map-by rack": "argument --map-by: invalid choice: 'rack'",
    "run -np 2 --bind-to thread": "argument --bind-to: invalid choice: 'thread'",
    "run -np 2 -p x": "argument -p/--ssh-port: invalid int value: 'x'",
    "run -np 2 --start-timeout 0": "argument --start-timeout: 0 is no time: give seconds, above 0",
    "run -np 2 --kill-after nan": "argument --kill-after: nan is no time: give seconds, above 0",
    "run -np 2 --launcher qsub": "argument --launcher: invalid choice: 'qsub'",
    "run -np 1 --mpirun /no/such/mpirun": "/no/such/mpirun is no program: name one with --mpirun",
    "run -np 1 --mpirun {dir}/empty": "{dir}/empty is no program: name one with --mpirun",
    "run -np 1 --mpirun true": "--version says 'true",
    "run -np 1 nosuchprogram": "'nosuchprogram' is no script (they end with .py), no program",
    "run -np 1 hosts": "'hosts' is no script (they end with .py), no program",
    **{
        f"run --dry-run -np 2 {words}": sentence
        for words, sentence in {
            "-x 1A=2": "'1A=2' names no environment variable",
            "-x ABSENT_VARIABLE": "-x ABSENT_VARIABLE: the variable is not set here",
            "-x 'A;B=1'": "'A;B=1' names no environment variable",
            "--network-interfaces 'eth0;x'": "'eth0;x' is no network interface",
            "-p 65536 -H a:2": "the ssh port is 65536: it must be between 1 and 65535",
            "-i ' ' -H a:2": "the ssh identity file has no name",
            "--ssh-connect-timeout 0": "the connect timeout is 0 s: it must be at least 1",
            """--mpi-args '"x'""": "cannot be split into words: No closing quotation",
            "--launcher srun": "srun cannot start the ranks: there is no ",  # srun, or no allocation
        }.items()
    },
}
# Variables before a command line.
VARIABLES = {
    f"{SLURM.format('n[1-', 2)} run -np 2": "SLURM_JOB_NODELIST:1: 'n[1-' has a [ without a ]",
    f"{SLURM.format('n1', 'x')} run -np 2": "Slurm gave 1 nodes (n1), but 'x' tasks on them",
    f"{SLURM.format('n1', '8(x99999999999)')} run -np 2": "but '8(x99999999999)' tasks on them",
    "PBS_JOBID=1 PBS_NODEFILE={dir}/none run -np 2": "the list of hosts {dir}/none (PBS) cannot be read",
    "PE_HOSTFILE={dir}/binary run -np 2": "the list of hosts {dir}/binary (Grid Engine) cannot be read",
    "LSB_JOBID=1 'LSB_MCPU_HOSTS=a x' doctor": "LSB_MCPU_HOSTS:1: slots must be a whole number above 0, not 'x'",
    "LSB_JOBID=1 LSB_MCPU_HOSTS=a run -np 2": "LSB_MCPU_HOSTS names no host",
    "HYDRA_HOST_FILE={dir}/none run -np 2": "the list of hosts {dir}/none (hostfile) cannot be read",
    "HYDRA_LAUNCHER_EXEC=-x run --dry-run -np 2 -H a:2": "'-x' is no program to reach hosts with",
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 run -np 2": "was itself started by Open MPI's mpirun",
}
# Settled when the process finds its place in the job: each needs a process of its own.
AT_THE_START = {
    "MPITRAIN_STALL_WARNING=soon": "--stall-warning (MPITRAIN_STALL_WARNING) is 'soon': give a number of seconds",
    "MPITRAIN_STALL_ABORT=-1": "--stall-abort (MPITRAIN_STALL_ABORT) is -1.0: it must be at least 0",
    "MPITRAIN_SAME_DATA=x": "MPITRAIN_SAME_DATA is 'x': choose one of warn, ignore",
    "MPITRAIN_COMPARE_RANKS=x": "MPITRAIN_COMPARE_RANKS is 'x': choose one of stop, warn, ignore",
    "MPITRAIN_NON_FINITE=x x.py": "(MPITRAIN_NON_FINITE) is 'x': choose one of stop, warn, ignore",
    "MPITRAIN_ALL_REDUCE=ring:0:1": "MPITRAIN_ALL_REDUCE='ring:0:1' is not understood",
    "MPITRAIN_ENGINE=fast": "MPITRAIN_ENGINE is 'fast': choose one of auto, native, python",
    "MPITRAIN_ENGINE=c x.py": "MPITRAIN_ENGINE is 'c': choose one of auto, native, python",
    "--gpu-memory lots": "GPU memory 'lots': expected growth, a fraction",
}
IN_ONE_PROCESS = {**OPTIONS, **FILES, **RUN, **VARIABLES}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the cases name, and packages that stand for those that must not be loaded."""
    path = tmp_path_factory.mktemp("input")
    for name in ("tensorflow", "keras"):
        (path / f"{name}.py").write_text("raise AssertionError('loaded to refuse an option')\n")
    for name, content in {
        "unknown.toml": b"epoch = 3\n",
        "latin.toml": b'data = "\xe9"\n',
        "nul.toml": b"epochs = 3\0",
        "twice.toml": b"epochs = 3\nepochs = 4\n",
        "deep.toml": b"data = " + b"[" * 5000 + b"]" * 5000,
        "table.toml": b"[epochs]\na = 1\n",
        "list.toml": b"epochs = [1]\n",
        "date.toml": b"epochs = 2020-01-01\n",
        "huge.toml": b"epochs = 99999999999999999999\n",
        "nan.toml": b"learning-rate = nan\n",
        "flag.toml": b"share-gpus = 1\n",
        "words.toml": b'epochs = "three"\n',
        "path.toml": b'output = "a\\u0000b"\n',
        "binary": b"\xff\xfe\x00a",
        "empty": b"",
        "slots": b"a\nb slots=0\n",
        "shell": b"$(id) slots=2\n",
    }.items():
        (path / name).write_bytes(content)
    return path


def split(case: str, directory: Path) -> tuple[dict[str, str], list[str]]:
    """The variables and the arguments of a case."""
    words = shlex.split(case.replace("{dir}", str(directory)))
    count = next((place for place, word in enumerate(words) if "=" not in word or word[0] == "-"), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def environ(directory: Path) -> dict[str, str]:
    """For processes with the cases: nothing of a launcher or batch system, and root may start jobs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PYTHONPATH": f"{directory}{os.pathsep}{REPOSITORY}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}


@pytest.fixture(scope="module")
def found(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the command did in each case: exit code, output, errors, seconds."""
    results = tmp_path_factory.mktemp("results")
    rows = []
    for case in IN_ONE_PROCESS:
        variables, arguments = split(case, directory)
        rows.append([case, arguments, arguments, variables])
    (results / "cases.json").write_text(json.dumps(rows))
    command = [sys.executable, str(PROGRAM), str(results / "cases.json"), str(results)]
    subprocess.run(command, env=environ(directory), cwd=results, timeout=240, check=True)
    assert sorted(path.name for path in results.iterdir()) == ["0.json", "cases.json"], "a case left something behind"
    reported: dict[str, list[Any]] = json.loads((results / "0.json").read_text())
    return reported


def test_there_are_many_cases() -> None:
    assert len(IN_ONE_PROCESS) + len(AT_THE_START) >= 100


@pytest.mark.parametrize("case", IN_ONE_PROCESS)
def test_bad_input(found: dict[str, list[Any]], directory: Path, case: str) -> None:
    code, out, err, _ = found[case]
    assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
    assert err.startswith("mpitrain: ")
    assert IN_ONE_PROCESS[case].replace("{dir}", str(directory)) in err


def test_what_a_process_is_told_at_its_start(directory: Path, tmp_path: Path) -> None:
    def run(case: str) -> subprocess.CompletedProcess[str]:
        variables, arguments = split(case, directory)
        return subprocess.run(
            [sys.executable, "-m", "mpitrain", *arguments],
            env={**environ(directory), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    with ThreadPoolExecutor(2) as pool:
        for case, finished in zip(AT_THE_START, pool.map(run, AT_THE_START), strict=True):
            assert (finished.returncode, finished.stdout) == (2, ""), (case, finished)
            assert finished.stderr.startswith("mpitrain: "), (case, finished.stderr)
            assert finished.stderr.count("\n") == 1
            assert AT_THE_START[case] in finished.stderr
    assert list(tmp_path.iterdir()) == []


def refuses(action: Any, *arguments: Any) -> None:
    """Any input is understood or refused; nothing else is raised."""
    with contextlib.suppress(UsageError):
        action(*arguments)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.dictionaries(st.sampled_from(["epochs", "data", "seed", "grace", "share-gpus", "x"]) | st.text(), SCALARS))
def test_any_configuration(values: dict[str, Any]) -> None:
    refuses(merge, {}, values, "job.toml")


@given(st.binary())
def test_any_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    refuses(read_file, path)
    refuses(read, str(path))


@given(st.text() | st.text("ab1:,[]-=# \nslotmax_", max_size=30))
def test_any_hosts(text: str) -> None:
    refuses(parse, text)
    assert slurm_counts(text) is None or all(count >= 0 for count in slurm_counts(text) or ())
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": text, "SLURM_JOB_CPUS_PER_NODE": text}
    for variables in (slurm, {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": text}, {"PE_HOSTFILE": text}):
        refuses(allocation.find, variables)
    refuses(parse_memory, text)
