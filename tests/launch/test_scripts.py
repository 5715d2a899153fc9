"""Keras scripts that know nothing of ranks: run as they are on 1, 2 and 3 ranks, beside plain Python."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.launch.conftest import REPOSITORY, SHARED, Mpirun

SCRIPTS = REPOSITORY / "tests" / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "everything")
# Of each kind one: fit, train_on_batch, an own loop, files. One rank runs a script as it is, and MPIs do not differ in
# what Keras does, so there these are enough.
SOME = ["backups", "custom_loop", "functional", "gan"]
# What is left where data do not divide evenly depends on how they are read.
DIVIDED = ["augmentation", "autoencoder", "custom_loop", "file_names", "functional", "gan", "generator", "multi"]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(REPOSITORY)}
Results = dict[str, dict[str, list[float]]]


def results(output: str) -> Results:
    """What each script printed."""
    found: Results = {}
    name = ""
    for line in output.splitlines():
        if line.startswith("SCRIPT "):
            name = line.split()[1]
        elif line.startswith("RESULT "):
            assert name not in found, "printed by more than one rank"
            found[name] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.fixture(scope="module", params=[SHARED])
def plain(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of plain Python."""
    directory = tmp_path_factory.mktemp("plain")
    names = NAMES if Mpirun().is_open_mpi else SOME
    command = [sys.executable, str(SCRIPTS / "everything.py"), str(directory), *names]
    finished = subprocess.run(
        command, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=1200, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return results(finished.stdout)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.mpich), 3])
def test_scripts_give_what_one_rank_gives(mpirun: Mpirun, tmp_path: Path, plain: Results, ranks: int) -> None:
    names = {1: SOME, 2: NAMES, 3: DIVIDED}[ranks] if mpirun.is_open_mpi else SOME
    assert set(plain) >= set(names)
    arguments = ["-m", "mpitrain", "--batch-size-is", "global", "--output", str(tmp_path / "logs")]
    files = tmp_path / "files"
    files.mkdir()
    finished = mpirun(ranks, [*arguments, str(SCRIPTS / "everything.py"), str(files), *names], timeout=1200, env=QUIET)
    assert finished.returncode == 0, finished.output
    found = results(finished.stdout)
    assert sorted(found) == names, finished.output
    for name in names:
        assert found[name].keys() == plain[name].keys(), name
        for key, expected in plain[name].items():
            if ranks == 1:
                assert found[name][key] == expected, (name, key)
            else:
                np.testing.assert_allclose(found[name][key], expected, rtol=2e-3, atol=2e-5, err_msg=f"{name} {key}")
    if ranks > 1:
        assert (tmp_path / "logs" / "rank-1.log").read_text().count("RESULT") == len(names)
        assert "gradients are averaged over all ranks" in (tmp_path / "logs" / "rank-0.log").read_text()


WORDS = """
import sys, os
print("argv", sys.argv[1:], __name__, os.path.basename(__file__), sys.modules["__main__"].__dict__ is globals())
print("answer", input("say: "))
import beside
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_finds_what_plain_python_gives_it(mpirun: Mpirun, tmp_path: Path, as_module: bool) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("print('beside')\n")
    script = package / "words.py"
    script.write_text(WORDS.replace("import beside", "from . import beside") if as_module else WORDS)
    options = ["-m", "mpitrain", "--output", str(tmp_path / "logs")]
    what = ["-m", "package.words"] if as_module else [str(script)]
    environment = {**QUIET, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    command = [mpirun.path, *mpirun.flags(2), "-np", "2", sys.executable, *options, *what, "7", "--epochs", "3"]
    finished = subprocess.run(
        command,
        env={**os.environ, **environment},
        input="yes\n",
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 7, (finished.stdout, finished.stderr)
    assert "argv ['7', '--epochs', '3'] __main__ words.py True" in finished.stdout, finished.stdout
    assert "answer yes" in finished.stdout
    assert finished.stdout.count("beside") == 1, finished.stdout
    assert "answer yes" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_what_is_not_divided_is_said(mpirun: Mpirun, tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('done')\n")
    finished = mpirun(2, ["-m", "mpitrain", "--output", str(tmp_path / "logs"), str(script)], env=QUIET)
    assert finished.returncode == 0, finished.output
    assert finished.stderr.count("trained nothing that could be divided") == 1, finished.output
    assert "did all of its work.\n" in finished.stderr, finished.output


def test_what_is_evaluated_is_not_said_to_be_done_by_each(mpirun: Mpirun, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(
        "import keras, numpy as np\n"
        "model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer='ones')])\n"
        "model.compile(loss='mae')\n"
        "print('LOSS', model.evaluate(np.ones((9, 1)) * 3, np.zeros((9, 1)), verbose=0))\n"
    )
    finished = mpirun(2, ["-m", "mpitrain", "--output", str(tmp_path / "logs"), str(script)], env=QUIET)
    assert finished.returncode == 0, finished.output
    assert "LOSS 3.0" in finished.stdout, finished.output
    assert finished.stderr.count("did all of its work, except for evaluate.") == 1, finished.output


def test_a_dry_run_ends_before_the_training(mpirun: Mpirun, tmp_path: Path) -> None:
    options = ["-m", "mpitrain", "--dry-run", "--output", str(tmp_path / "logs")]
    finished = mpirun(2, [*options, str(SCRIPTS / "functional.py")], env=QUIET)
    assert finished.returncode == 0, finished.output
    assert "RESULT" not in finished.stdout
    assert re.search(
        r"^data +fit: arrays are divided by rows; batch size 24 is per rank, 2 times", finished.stdout, re.MULTILINE
    )
    assert re.search(r"^callbacks +EarlyStopping", finished.stdout, re.MULTILINE), finished.output


VARIED = """
import json, os, sys, keras, numpy as np, tensorflow as tf, matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
try:
    model.save("/proc/none/model.keras")
except Exception:
    print("caught")
model.save_weights("here.weights.h5")
plt.figure().savefig("plot.png")
print(os.path.exists("here.weights.h5"), os.path.exists("plot.png"))
print(*[int(x) for batch in tf.data.Dataset.range(6).batch(2) for x in batch])

os.makedirs("made/deep")
for name in ("made", "old"):
    try:
        os.mkdir(name)
        print(name)
    except FileExistsError:
        print(name, "is there")
path = keras.utils.get_file("data.npz", origin=sys.argv[1], cache_dir=os.getcwd())
print(np.load(path)["x"].sum())
try:
    keras.utils.get_file("none.npz", origin=sys.argv[1] + ".none", cache_dir=os.getcwd())
except Exception as error:
    print("404" in str(error))
with open("made/numbers.json", "a") as file:
    json.dump([1, 2], file)
keras.utils.save_img("made/image.png", np.zeros((2, 2, 3)))
print(os.path.exists("made/image.png"))
"""


@contextlib.contextmanager
def served(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """The files of a directory by HTTP: where, and what was asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(directory))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def test_files_and_loops_of_a_script(mpirun: Mpirun, tmp_path: Path) -> None:
    script = tmp_path / "varied.py"
    script.write_text(VARIED)
    (tmp_path / "old").mkdir()
    os.utime(tmp_path / "old", (0, 0))
    (tmp_path / "web").mkdir()
    np.savez(tmp_path / "web" / "data.npz", x=np.arange(5.0))
    with served(tmp_path / "web") as (place, asked):
        arguments = ["-m", "mpitrain", "--divide-loops", str(script), f"{place}/data.npz"]
        finished = mpirun(2, arguments, cwd=tmp_path, env={**QUIET, "no_proxy": "127.0.0.1"})
    assert finished.returncode == 0, finished.output
    logs = tmp_path / "mpitrain-output"
    # Of three batches each rank has one, and its row of the last.
    after = ["made is there", "old is there", "10.0", "True", "True"]
    words = [line for line in finished.stdout.splitlines() if line in ("caught", "True True", "0 1 4", *after)]
    assert words == ["caught", "True True", "0 1 4", *after], finished.output
    theirs = (logs / "rank-1.log").read_text().splitlines()  # with what native code says
    assert [line for line in theirs if line in ("caught", "True True", "2 3 5", *after)] == [
        *("caught", "True True", "2 3 5"),
        *after,
    ]
    assert asked == ["/data.npz", "/data.npz.none"], "by rank 0 alone"
    table = (logs / "rank-0.log").read_text()
    assert "savefig: written by rank 0" in table
    assert "get_file: by one rank of each host, rank 0 first" in table
    assert table.count("opened by the script itself, so every rank writes it") == 1, table
    assert "numbers.json: opened by the script itself" in table
    assert finished.stderr.count("the script appends to numbers.json itself, and so does each of the 2 ranks") == 1


PRINTED = """
import atexit, logging, os, sys, threading, warnings
logging.basicConfig(level=logging.INFO)
import keras
import numpy as np
import tensorflow as tf
from absl import logging as of_absl
print("W01")
logging.info("W02")
of_absl.set_verbosity("info")
of_absl.info("W03")
warnings.warn("W" + "04")
tf.print("W05")
tf.get_logger().warning("W06")
sys.stderr.write("W07\\n")
sys.__stderr__.write("W08\\n")
print("\\rW09", end="\\n", file=sys.stderr, flush=True)
os.system("echo W10")
threading.Thread(target=lambda: print("W11")).start()
atexit.register(lambda: print("W12"))

@tf.function
def said():
    tf.print("W13", output_stream=sys.stdout)

said()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
"""


@pytest.mark.mpich
def test_each_line_is_on_the_terminal_once(mpirun: Mpirun, tmp_path: Path) -> None:
    script = tmp_path / "printed.py"
    script.write_text(PRINTED)
    finished = mpirun(2, ["-m", "mpitrain", "--output", str(tmp_path / "logs"), str(script)], env=QUIET)
    assert finished.returncode == 0, finished.output
    words = [f"W{number:02d}" for number in range(1, 14)]
    assert sorted(re.findall(r"W\d\d", finished.output)) == words, finished.output
    assert sorted(re.findall(r"W\d\d", (tmp_path / "logs" / "rank-1.log").read_text())) == words
    assert finished.stderr.count("mpitrain: 2 ranks train together; fit: arrays are divided by rows") == 1


OWN_SEED = """
import time, keras, numpy as np, tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((np.ones((64, 2)), np.arange(64))).shuffle(64, seed=time.time_ns() % 1000000)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(data.batch(16), verbose=0)
"""
OF_KERAS_2 = """
import tf_keras
model = tf_keras.Model()
print("made")
model.fit()
"""
# What a script sees of the package, which is no dependency of the tests.
TF_KERAS = """
from types import SimpleNamespace
class Model:
    def fit(self): pass
    def train_on_batch(self): pass
class Optimizer:
    def apply_gradients(self): pass
optimizers = SimpleNamespace(Optimizer=Optimizer, legacy=SimpleNamespace(Optimizer=Optimizer))
"""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (OWN_SEED, "fit: y is not the same on rank 1"),
        (OF_KERAS_2, "the script trains with tf_keras (Keras 2), and only Keras 3 is made data-parallel"),
    ],
)
def test_what_would_be_wrong_is_refused(mpirun: Mpirun, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "script.py").write_text(content)
    (tmp_path / "tf_keras.py").write_text(TF_KERAS)
    arguments = ["-m", "mpitrain", "--output", str(tmp_path / "logs"), str(tmp_path / "script.py")]
    finished = mpirun(2, arguments, env=QUIET)
    assert finished.returncode == 2, finished.output
    assert finished.stderr.count(words) == 1, finished.output
    assert "Traceback" not in finished.output


HOROVOD = """
import horovod.tensorflow as hvd
import horovod.keras.callbacks, horovod.tensorflow.keras as other
import horovod
from horovod.common.util import env, split_list
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.runner.common.util.hosts import parse_hosts
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import join
hvd.init()
assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and Compression is hvd.Compression
print("sum", float(hvd.allreduce(float(hvd.rank() + 1), op=hvd.Sum)), other.size())
try:
    import horovod.torch
except ImportError as error:
    print("no", error)
"""


def test_a_horovod_script_runs_as_it_is(mpirun: Mpirun, tmp_path: Path) -> None:
    script = tmp_path / "old.py"
    script.write_text(HOROVOD)
    timeline = {"HOROVOD_TIMELINE": str(tmp_path / "timeline.json")}
    finished = mpirun(2, ["-m", "mpitrain", "--as-horovod", "python", str(script)], env={**QUIET, **timeline})
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("sum 3.0 2") == 2, finished.output
    assert finished.stdout.count("no horovod.torch is not provided by mpitrain") == 2, finished.output
    assert finished.stderr.count("Horovod is not installed") == 1, finished.output
    for name in ("timeline.json", "timeline.rank-1.json"):
        assert "NEGOTIATE_ALLREDUCE" in [event["name"] for event in json.loads((tmp_path / name).read_text())]
    command = [sys.executable, "-m", "mpitrain", str(script)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **QUIET})
    assert "No module named 'horovod'; Horovod is not installed" in failed.stderr
    assert "put --as-horovod before the script" in failed.stderr.splitlines()[-1]
