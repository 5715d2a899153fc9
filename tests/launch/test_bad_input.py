"""Wrong input: one sentence from rank 0, exit code 2 on all ranks, no traceback, no hang."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint import files
from tests.launch.conftest import REPOSITORY, Mpirun

SECONDS = 120.0  # for one case, on a busy machine
FUNCTIONS = """
import keras, mpitrain, tensorflow as tf

def digits_model(units, shape=(8, 8, 1)):
    return keras.Sequential([keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(units)])

def nine_outputs(): return digits_model(9)
def other_shape(): return digits_model(10, (5,))
def maps(): return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(10, 3)])
def fails(): raise RuntimeError("out of paint")
def number(): return 3
def batches(): return tf.data.Dataset.from_tensor_slices((tf.zeros((8, 4)), tf.zeros(8, tf.int64))).batch(2)
def endless(): return tf.data.Dataset.from_tensors((tf.zeros(4), 1)).repeat()
def points(n): return tf.data.Dataset.from_tensor_slices((tf.zeros((n, 4)), tf.range(n) % 2))
def differ(): return points(30 - 10 * mpitrain.init().rank)
def on_one_rank(): return open("none").close() if mpitrain.init().rank else points(30)
"""


@dataclass(frozen=True)
class Case:
    """One wrong input.

    Attributes:
        name: for the report.
        arguments: of the command, with {dir} for the directory of files.
        sentence: a pattern that the whole sentence matches.
        others: arguments of ranks other than 0, where they differ.
        begun: what will be trained is printed before.
    """

    name: str
    arguments: tuple[str, ...]
    sentence: str
    others: tuple[str, ...] | None = None
    begun: bool = False


BEFORE_TENSORFLOW = (
    Case(
        "unknown option",
        ("--epoch", "3"),
        r"unrecognized arguments: --epoch 3 \(did you mean --epochs\?\); see mpitrain --help",
    ),
    Case("unknown command", ("tran",), r"unrecognized arguments: tran \(did you mean train\?\); see mpitrain --help"),
    Case("no value", ("--epochs",), r"argument --epochs: expected one argument; see mpitrain --help"),
    Case("batch size 0", ("--batch-size", "0"), r"--batch-size is 0: it must be at least 1"),
    Case("epochs", ("--epochs", "x"), r"--epochs is 'x': give a whole number"),
    Case("optimizer", ("--optimizer", "best"), r"--optimizer is 'best': choose one of .*"),
    Case("no configuration", ("--config", "{dir}/none.toml"), r"the configuration .* cannot be read .*"),
    Case("configuration", ("--config", "{dir}/wrong.toml"), r"there is no option 'epoch' in .*: did you mean epochs\?"),
    Case("output is a file", ("--output", "{dir}/wrong.toml"), r"nothing can be saved in .*"),
    Case("one rank's option", (), r"on rank 1 \(.*\) only: --epochs is 0: it must be at least 1", ("--epochs", "0")),
    Case("one rank's argument", (), r"on rank 1 \(.*\) only: unrecognized arguments: --x; .*", ("--x",)),
    Case(
        "one rank's file",
        ("--config", "{dir}/good.toml"),
        r"on rank 1 \(.*\) only: the configuration .* cannot be read .*",
        ("--config", "{dir}/none.toml"),
    ),
    Case(
        "ranks differ",
        ("--epochs", "2"),
        r"option --epochs must be the same on all ranks, but is 2 on rank 0 .* 3 on rank 1 .*",
        ("--epochs", "3"),
    ),
    Case("no script", ("{dir}/absent.py",), r"the script .*/absent\.py cannot be read: .*"),
    Case("a script that is a directory", ("{dir}/directory.py",), r"the script .*/directory\.py cannot be read: .*"),
    Case("bench", ("bench", "none"), r"argument NAME: invalid choice: 'none' .*"),
)
RESUME = ("--model", "mlp", "--checkpoint-dir", "{dir}/checkpoints", "--resume")
TRACE = r"Traceback \(most recent call last\):\n  File \"[^\"]*given\.py\", [\s\S]*"  # of the user's own lines alone
REFUSED = r".* cannot be resumed from: .*"
WITH_TENSORFLOW = (
    Case("no data", ("--data", "{dir}/none.npz"), r"data '.*none\.npz' do not exist: give .*"),
    Case("unreadable npz", ("--data", "{dir}/text.npz"), r".*text\.npz cannot be read as \.npz .*"),
    Case("ragged npz", ("--data", "{dir}/ragged.npz"), r".*ragged\.npz: x holds Python objects.*"),
    Case("unequal npz", ("--data", "{dir}/unequal.npz"), r".*: x has 5 samples, but y has 4 labels.*"),
    Case("ragged csv", ("--data", "{dir}/ragged.csv"), r".*ragged\.csv.*"),
    Case("labels", ("--data", "{dir}/good.npz", "--classes", "2"), r".* is 2, but there are 2 classes.*"),
    Case("negative labels", ("--data", "{dir}/negative.npz"), r".*: the label of sample 1 is -1.*"),
    Case("too few samples", ("--data", "{dir}/one.npz", "--task", "regression"), r".* 1 training sample, too few .*"),
    Case("empty folder", ("--data", "{dir}/empty"), r".*empty.*"),
    Case("no module", ("--data", "nowhere:f"), r"module 'nowhere' cannot be imported .*"),
    Case("no function", ("--data", "given:f"), r"module 'given' has no function 'f': .*"),
    Case("function fails", ("--data", "given:fails"), rf"given:fails failed \(RuntimeError: out of paint\)\n{TRACE}"),
    Case("no dataset", ("--data", "given:number"), r"given:number returns a int: .*"),
    Case("batches", ("--data", "given:batches"), r"given:batches returns batches, .*"),
    Case("endless", ("--data", "given:endless"), r"given:endless returns a dataset without end: .*"),
    Case("no model", ("--model", "cnnn"), r"there is no model 'cnnn': .*"),
    Case("no model file", ("--model", "{dir}/none.keras"), r"there is no model file .*"),
    Case("model file", ("--model", "{dir}/text.keras"), r".* cannot be loaded as a Keras model .*"),
    Case("model is none", ("--model", "given:number"), r"given:number returns a int: return a keras\.Model"),
    Case("too few outputs", ("--model", "given:nine_outputs"), r"the model has 9 outputs, but .* 10 classes .*"),
    Case("input shape", ("--model", "given:other_shape"), r"the model does not take samples of shape .*"),
    Case("output shape", ("--model", "given:maps"), r"the model's output has shape .*"),
    Case("table for cnn", ("--data", "{dir}/good.npz"), r"cnn needs images .*"),
    Case(
        "one rank's data",
        ("--data", "given:on_one_rank", "--model", "mlp"),
        r"on rank 1 \(.*\) only: given:on_one_rank failed \(FileNotFoundError: .*\n" + TRACE,
    ),
    Case(
        "data differ",
        ("--data", "given:differ", "--model", "mlp"),
        r"the number of samples in .* must be the same on all ranks, but is \(27, 3, 0\) on rank 0 .*",
    ),
    Case("npz cut off", ("--data", "{dir}/cut.npz"), r".*cut\.npz cannot be read as \.npz .*"),
    Case("npz changed", ("--data", "{dir}/changed.npz"), r".*changed\.npz cannot be read as \.npz .*"),
    Case("empty npz", ("--data", "{dir}/nothing.npz"), r".*nothing\.npz cannot be read as \.npz .*"),
    Case("single array", ("--data", "{dir}/single.npz"), r".*single\.npz holds a single array: .*"),
    Case("names", ("--data", "{dir}/names.npz"), r".*names\.npz holds a, b, c: name its arrays .*"),
    Case("not finite", ("--data", "{dir}/infinite.npz"), r".*infinite\.npz, x: sample 2 has values that are not .*"),
    Case("texts", ("--data", "{dir}/texts.npz"), r".*texts\.npz, x: samples are of type .*, not numbers: .*"),
    Case("words in csv", ("--data", "{dir}/words.csv"), r".*words\.csv.*'red'.*"),
    Case(
        "binary csv",
        ("--data", "{dir}/binary.csv"),
        r".*binary\.csv, line 1 cannot be read .* in UTF-8",
    ),
    Case("header only", ("--data", "{dir}/header.csv"), r".*header\.csv has a header but no rows: .*"),
    Case("records cut off", ("--data", "{dir}/cut.tfrecord"), r".*cut\.tfrecord is cut off in record 0, .*"),
    Case("no records", ("--data", "{dir}/nothing.tfrecord"), r".*nothing\.tfrecord is empty: .*"),
    Case("kind of file", ("--data", "{dir}/good.toml"), r".*good\.toml is of no kind that can be read here: .*"),
    Case("feature spec", ("--feature-spec", "{{", "--data", "{dir}/one.tfrecord"), r".*one\.tfrecord.*"),
    Case("model file cut off", ("--model", "{dir}/cut.keras"), r".* cannot be loaded as a Keras model .*"),
    Case("no checkpoint", (*RESUME, "{dir}/none"), rf"{REFUSED}none/manifest\.json cannot be read .*", begun=True),
    Case("manifest cut off", (*RESUME, "{dir}/cut/checkpoint-000001"), rf"{REFUSED} cut off or .*", begun=True),
    Case("arrays changed", (*RESUME, "{dir}/changed/checkpoint-000001"), rf"{REFUSED} checksum .*", begun=True),
    Case("arrays cut off", (*RESUME, "{dir}/short/checkpoint-000001"), rf"{REFUSED} bytes instead .*", begun=True),
    Case("other writer", (*RESUME, "{dir}/other/checkpoint-000001"), rf"{REFUSED}it is not of this .*", begun=True),
    Case(
        "file for checkpoints",
        ("--model", "mlp", "--checkpoint-dir", "{dir}/wrong.toml"),
        r"no checkpoint can be written in .*wrong\.toml .*",
        begun=True,
    ),
    Case(
        "too few to validate",
        ("--data", "{dir}/few.npz", "--model", "mlp"),
        r".* 1 validation sample, too few for 2 ranks: .*",
    ),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the cases name."""
    path = tmp_path_factory.mktemp("input")
    (path / "given.py").write_text(FUNCTIONS)
    (path / "wrong.toml").write_text("epoch = 3\n")
    (path / "good.toml").write_text("epochs = 3\n")
    for name in ("text.npz", "text.keras"):
        (path / name).write_text("no such thing")
    (path / "ragged.csv").write_text("a,b,label\n1,2,0\n1,2\n")
    for name in ("empty", "directory.py"):
        (path / name).mkdir()
    x, y = np.zeros((30, 4), np.float32), np.arange(30) % 3
    np.savez(path / "good.npz", x=x, y=y)
    np.savez(path / "few.npz", x=x[:10], y=y[:10])
    np.savez(path / "unequal.npz", x=x[:5], y=y[:4])
    np.savez(path / "negative.npz", x=x[:3], y=np.array([0, -1, 1]))
    np.savez(path / "one.npz", x=x[:1], y=np.array([0.5]))
    np.savez(path / "names.npz", a=x, b=y, c=y)
    np.savez(path / "texts.npz", x=np.array(["a", "b"]), y=y[:2])
    np.savez(path / "infinite.npz", x=np.where(np.arange(30)[:, None] == 2, np.inf, x), y=y)
    np.save(path / "single.npy", x)
    (path / "single.npy").rename(path / "single.npz")
    good = (path / "good.npz").read_bytes()
    (path / "cut.npz").write_bytes(good[: len(good) // 2])
    (path / "changed.npz").write_bytes(good[:100] + bytes([good[100] ^ 4]) + good[101:])
    for name in ("nothing.npz", "nothing.tfrecord"):
        (path / name).touch()
    for name in ("cut.tfrecord", "one.tfrecord"):
        (path / name).write_bytes(bytes([9, *[0] * 11, 1, 2, 3]))
    (path / "cut.keras").write_bytes(b"PK\3\4" + bytes(40))
    (path / "words.csv").write_text("a,b,label\n1,red,0\n")
    (path / "binary.csv").write_bytes(bytes(range(128, 256)))
    (path / "header.csv").write_text("a,b,label\n")
    damaged_checkpoints(path)
    np.savez(path / "ragged.npz", x=np.array([[1], [1, 2]], object), y=y[:2])
    return path


def damaged_checkpoints(path: Path) -> None:
    """Of each kind of damage one, in a directory of its own."""
    for name in ("cut", "changed", "short", "other"):
        (path / name).mkdir()
        checkpoint = path / name / "checkpoint-000001"
        files.write(checkpoint, files.Snapshot({"trainable/0": np.arange(100.0)}, {"ranks": 2}))
        damaged = checkpoint / (files.MANIFEST if name == "cut" else files.ARRAYS)
        content = damaged.read_bytes()
        if name in ("cut", "short"):
            damaged.write_bytes(content[:-7])
        elif name == "changed":
            damaged.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])


def run(mpirun: Mpirun, cases: tuple[Case, ...], directory: Path, results: Path) -> list[dict[str, list[object]]]:
    """Run cases in one job of two ranks; what each rank reports."""

    def filled(arguments: tuple[str, ...]) -> list[str]:
        return [argument.replace("{dir}", str(directory)) for argument in arguments]

    rows = [[case.name, filled(case.arguments), filled(case.others or case.arguments), {}] for case in cases]
    (results / "cases.json").write_text(json.dumps(rows))
    program = Path(__file__).with_name("bad_input_program.py")
    finished = mpirun(
        2,
        [str(program), str(results / "cases.json"), str(results)],
        timeout=SECONDS * 3,
        env={"PYTHONPATH": f"{REPOSITORY}:{directory}"},
        cwd=results,
    )
    assert finished.returncode == 0, finished.output
    assert finished.stdout == "", finished.output
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(BEFORE_TENSORFLOW, id="options", marks=pytest.mark.mpich),
        pytest.param(WITH_TENSORFLOW, id="data and models"),
    ],
)
def test_bad_input(mpirun: Mpirun, cases: tuple[Case, ...], directory: Path, tmp_path: Path) -> None:
    root, other = run(mpirun, cases, directory, tmp_path)
    wrong = []
    for case in cases:
        code, out, err, seconds = root[case.name]
        sentence = re.fullmatch(rf"mpitrain: {case.sentence}\n", str(err))
        if (
            code != 2
            or bool(out) != case.begun
            or not sentence
            or float(str(seconds)) > SECONDS
            or (str(err).count("\n") != 1 and TRACE not in case.sentence)
        ):
            wrong.append((case.name, root[case.name]))
        if other[case.name][:3] != [2, "", ""]:
            wrong.append((f"{case.name}, rank 1", other[case.name]))
    assert wrong == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--batch-size", "0"], id="option", marks=pytest.mark.mpich),
        pytest.param(["--data", "none.npz"], id="data"),
    ],
)
def test_exit_code_of_the_job(mpirun: Mpirun, arguments: list[str], tmp_path: Path) -> None:
    finished = mpirun(2, ["-m", "mpitrain", *arguments], cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert finished.returncode == 2, finished.output
    assert "Traceback" not in finished.stderr
    assert len(re.findall(r"^mpitrain: ", finished.stderr, re.MULTILINE)) == 1, finished.output
    assert "MPI_ABORT" not in finished.output.upper(), "the ranks left by themselves"


@pytest.mark.mpich
def test_help_is_printed_once(mpirun: Mpirun) -> None:
    finished = mpirun(2, ["-m", "mpitrain", "--help"])
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("usage: mpitrain") == 1
    assert "--learning-rate" in finished.stdout
    assert finished.complaints == []
