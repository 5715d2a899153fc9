"""The training job from the outside: the default one, the examples, the ways to start it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.conftest import LAUNCHER_PREFIXES, REPOSITORY, Finished, Mpirun

ENOUGH = 0.97
EPOCHS = 14
SHORT = ("--epochs", "1", "--model", "mlp")
ALONE = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}


def accuracy(output: str) -> float:
    """What the last lines of a job say."""
    found = re.search(r"^result +accuracy ([\d.]+), loss [\d.]+ on the test samples$", output, re.MULTILINE)
    assert found, output
    return float(found.group(1))


def check_default_job(finished: Finished, ranks: int, output: Path) -> None:
    """Accuracy, what was printed, and what was left behind."""
    assert finished.returncode == 0, finished.output
    assert accuracy(finished.stdout) >= ENOUGH, finished.output
    assert f"batch      8 a rank, {8 * ranks} in all" in finished.stdout
    assert "learning rate 0.005 (scaling with ranks: none, decay: cosine)" in finished.stdout
    assert len(re.findall(rf"^epoch \d+/{EPOCHS} ", finished.stdout, re.MULTILINE)) == EPOCHS, (
        "ranks other than 0 are silent"
    )
    assert re.search(r"compute [\d.]+, exchange [\d.]+, waiting for the slowest rank [\d.]+", finished.stdout)
    assert finished.complaints == [], finished.output
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["ranks"], len(summary["history"]["loss"])) == (ranks, EPOCHS)
    assert sorted(path.name for path in output.iterdir()) == ["model.keras", "summary.json"]


def run_alone(*args: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """`python ARGS` without a launcher."""
    return subprocess.run(
        [sys.executable, *args], cwd=REPOSITORY, env=ALONE, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_verbose_tells_which_way_gradients_take(mpirun: Mpirun, tmp_path: Path) -> None:
    finished = mpirun(
        2, ["-m", "mpitrain", *SHORT, "--verbose", "--output", str(tmp_path)], env={"MPITRAIN_ENGINE": "python"}
    )
    assert finished.returncode == 0, finished.output
    (line,) = [line for line in finished.stderr.splitlines() if "exchanges what is to be combined" in line]
    assert line.startswith("mpitrain: rank 0 (")
    assert line.endswith("): Python exchanges what is to be combined: MPITRAIN_ENGINE=python")


@pytest.mark.mpich
def test_default_job(mpirun: Mpirun, tmp_path: Path) -> None:
    check_default_job(mpirun(2, ["-m", "mpitrain", "--output", str(tmp_path)]), 2, tmp_path)


@pytest.mark.mpich
def test_one_rank_under_a_launcher(mpirun: Mpirun, tmp_path: Path) -> None:
    finished = mpirun(1, ["-m", "mpitrain", *SHORT, "--output", str(tmp_path)])
    assert finished.returncode == 0, finished.output
    assert finished.stdout.startswith("mpitrain"), finished.output
    assert ": 1 rank on 1 host, " in finished.stdout
    assert 0.5 < accuracy(finished.stdout) <= 1
    assert finished.complaints == [], finished.output


def test_alone_the_saved_model_is_plain_keras_and_as_good_as_said(tmp_path: Path) -> None:
    """Started by the console script."""
    script = Path(sysconfig.get_path("scripts")) / "mpitrain"
    if not script.exists():
        pytest.fail("mpitrain is not installed in this environment: pip install -e .")
    finished = subprocess.run(
        [script, "--output", str(tmp_path)], env=ALONE, capture_output=True, text=True, timeout=400, check=False
    )
    check_default_job(Finished((), finished.returncode, finished.stdout, finished.stderr, 0.0), 1, tmp_path)
    code = (
        "import sys, keras\n"
        "from sklearn.datasets import load_digits\n"
        "x, y = load_digits(return_X_y=True)\n"
        f"model = keras.models.load_model({str(tmp_path / 'model.keras')!r})\n"
        "hits = model.predict(x.reshape(-1, 8, 8, 1), verbose=0).argmax(-1) == y\n"
        "print(hits.mean() > 0.98, [name for name in sys.modules if name.startswith('mpitrain')])\n"
    )
    assert run_alone("-c", code).stdout.strip() == "True []"


@pytest.mark.parametrize("example", ["keras_fit.py", "custom_loop.py"])
def test_examples(mpirun: Mpirun, example: str) -> None:
    finished = mpirun(2, [f"examples/{example}"])
    assert finished.returncode == 0, finished.output
    found = re.findall(r"^test accuracy ([\d.]+) on 2 ranks$", finished.stdout, re.MULTILINE)
    assert len(found) == 1, finished.output
    assert float(found[0]) > 0.93
    assert finished.complaints == []


def test_public_calls_in_a_graph_say_nothing(mpirun: Mpirun) -> None:
    finished = mpirun(2, [str(Path(__file__).parent / "graph_calls_program.py")])
    assert finished.returncode == 0, finished.output
    assert sorted(finished.stdout.split("\n"))[1:] == ["rank 0: 0.6", "rank 1: 0.6"]
    assert finished.complaints == []


def test_example_alone() -> None:
    finished = run_alone("examples/keras_fit.py")
    assert finished.returncode == 0, finished.stderr
    assert "on 1 ranks" in finished.stdout


def test_own_data_and_options_from_a_file(mpirun: Mpirun, tmp_path: Path) -> None:
    rows = [f"{a},{b},{int(a * 2 > b)}" for a in range(20) for b in range(20)]
    (tmp_path / "points.csv").write_text("\n".join(["a,b,label", *rows]))
    (tmp_path / "job.toml").write_text(
        'data = "points.csv"\nmodel = "mlp"\nepochs = 9\nlr-scaling = "linear"\nlr-decay = "cosine"\n'
    )
    args = ["-m", "mpitrain", "--config", "job.toml", "--epochs", "2", "--precision", "mixed_float16"]
    finished = mpirun(2, args, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert finished.returncode == 0, finished.output
    assert "360 training, 40 validation, 0 test samples, 2 classes" in finished.stdout
    assert "learning rate 0.002 (scaling with ranks: linear, decay: cosine)" in finished.stdout
    assert len(re.findall(r"^epoch \d/2 .*samples/s$", finished.stdout, re.MULTILINE)) == 2
    assert "on the validation samples" in finished.stdout
    assert (tmp_path / "mpitrain-output" / "model.keras").exists()


def test_the_saved_model_is_as_good_on_raw_pictures_as_was_said(mpirun: Mpirun, tmp_path: Path) -> None:
    """Of texts as labels and bytes as pictures, in plain Keras, with the names of the classes from the summary."""
    random = np.random.default_rng(0)
    names = np.array(["dusk", "dawn", "noon"])
    arrays: dict[str, Any] = {}
    for part, count in (("train", 240), ("val", 30), ("test", 60)):
        classes = np.arange(count) % 3
        light = np.array([40, 60, 200])[classes][:, None, None]
        arrays[f"x_{part}"] = (light + random.integers(-25, 26, (count, 5, 6))).astype(np.uint8)
        arrays[f"y_{part}"] = names[classes]
    np.savez(tmp_path / "light.npz", **arrays)
    options = ["--data", "light.npz", "--model", "mlp", "--epochs", "2", "--learning-rate", "0.01"]
    finished = mpirun(3, ["-m", "mpitrain", *options], cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert finished.returncode == 0, finished.output
    assert ": 240 training, 30 validation, 60 test samples, 3 classes" in finished.stdout
    assert "inputs     x_train, 5x6 uint8, from " in finished.stdout
    assert "; the saved model itself divides them by 255\n" in finished.stdout
    assert "labels     y_train, classes dawn, dusk, noon\n" in finished.stdout
    code = (
        "import json, keras, numpy as np\n"
        f"data, output = np.load({str(tmp_path / 'light.npz')!r}), {str(tmp_path / 'mpitrain-output')!r}\n"
        "names = np.array(json.load(open(output + '/summary.json'))['class_names'])\n"
        "model = keras.models.load_model(output + '/model.keras')\n"
        "found = names[model.predict(data['x_test'][..., None], verbose=0).argmax(-1)]\n"
        "print((found == data['y_test']).mean())\n"
    )
    said = accuracy(finished.stdout)
    assert float(run_alone("-c", code).stdout) == pytest.approx(said, abs=1e-4)
    assert said > 0.5


def test_bar_on_a_terminal(mpirun: Mpirun, tmp_path: Path) -> None:
    """The launcher's own terminal decides; what the ranks have is a pipe or a pseudo-terminal of its own."""
    controller, terminal = pty.openpty()
    command = [
        mpirun.path,
        *mpirun.flags(2),
        "-np",
        "2",
        sys.executable,
        "-m",
        "mpitrain",
        "--output",
        str(tmp_path),
        *SHORT,
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=ALONE, stdin=subprocess.DEVNULL, stdout=terminal)
    os.close(terminal)
    chunks = []
    try:
        while chunk := os.read(controller, 65536):
            chunks.append(chunk)
    except OSError:  # the other side was closed
        pass
    assert process.wait(timeout=400) == 0
    text = b"".join(chunks).decode()
    assert "━" in text
    shown = set(re.findall(r"loss [\d.]+  accuracy [\d.]+  [\d,]+ images/s", text))
    assert len(shown) > 1, f"the numbers change while an epoch runs: {text}"
