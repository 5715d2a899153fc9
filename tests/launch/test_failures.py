"""What happens to a job when one of its ranks fails, or ends before the others."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Finished, Mpirun
from tests.launch.test_faults import WARNING, finish

# The MPIs differ in how they end ranks, and how these wait: not in what TensorFlow does with an exception in data.
mpich = pytest.mark.mpich

START = """
import sys, time
import mpitrain
world = mpitrain.init()
last = world.rank == world.size - 1
def now(): return f"at {time.time():.3f}"
"""
KERAS = (
    START
    + """
import keras, numpy as np, tensorflow as tf
def train(dataset, callbacks=(), epochs=1):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(dataset, epochs=epochs, verbose=0, callbacks=[mpitrain.callbacks.DataParallel(), *callbacks])
    return model
data = tf.data.Dataset.from_tensor_slices((np.ones((20, 4), "f"), np.ones((20, 1), "f"))).batch(2)
"""
)
RAISES = {
    "main thread": START + "if last: print(now(), flush=True); raise ValueError('cause')\nmpitrain.barrier()\n",
    "before a collective of MPI": START
    + "from mpi4py import MPI\nif last: print(now(), flush=True); 1 / 0  # cause\nMPI.COMM_WORLD.Barrier()\n",
    "other thread": START
    + "import threading\ndef f(): print(now(), flush=True); raise ValueError('cause')\n"
    + "if last: threading.Thread(target=f).start()\nmpitrain.barrier() if not last else time.sleep(60)\n",
    "data": KERAS
    + """
def load(x):
    if last and x.sum() > 1e3: print(now(), flush=True); raise ValueError("cause")
    return x
rising = np.full((20, 4), 1e3 * (np.arange(20) > 9)[:, None], "f")
big = tf.data.Dataset.from_tensor_slices((rising, np.ones((20, 1), "f")))
train(big.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(load, [x], tf.float32), [4]), y)).batch(2))
""",
    "callback": KERAS
    + """
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if last and batch == 3: print(now(), flush=True); raise ValueError("cause")
train(data, [Fails()])
""",
}
OF_KERAS = ("data", "callback")


def run(mpirun: Mpirun, directory: Path, code: str, np: int = 2) -> Finished:
    script = directory / "script.py"
    script.write_text(code)
    return mpirun(np, [str(script)], timeout=150, env={"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)})


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "where", [where if where in OF_KERAS else pytest.param(where, marks=mpich) for where in RAISES]
)
def test_an_exception_ends_the_job(mpirun: Mpirun, tmp_path: Path, where: str) -> None:
    finished = run(mpirun, tmp_path, RAISES[where])
    ended = time.time()
    assert finished.returncode not in (0, 124), finished.output
    raised = re.search(r"at (\d+\.\d+)", finished.stdout)
    assert raised, finished.output
    assert ended - float(raised[1]) < 5, finished.output
    assert len(re.findall(r"mpitrain: rank \d+ on \S+ failed", finished.stderr)) == 1, finished.output
    assert re.search(r"mpitrain: rank 1 on \S+ failed", finished.stderr), finished.output
    assert finished.stderr.count("Traceback (most recent call last)") >= 1, finished.output
    assert "cause" in finished.stderr, finished.output


LOOPS = (
    KERAS
    + """
steps = %d if last else 6
def made(kind, graph):
    w = keras.Variable(np.zeros(4, "f"))
    optimizer = mpitrain.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([w])
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((w - 1.0) ** 2)
        if kind == "optimizer":
            optimizer.apply(tape.gradient(loss, [w]))
        else:
            w.assign_sub(0.1 * mpitrain.DistributedGradientTape(tape).gradient(loss, w))
    return w, tf.function(step) if graph else step
loops = {(kind, graph): made(kind, graph) for kind in ("optimizer", "tape") for graph in (False, True)}
for _ in range(steps):
    for _, step in loops.values(): step()
for way, (w, _) in loops.items():
    print("rank", world.rank, "made", steps, "steps", *way, "at", f"{float(w[0]):.4f}", flush=True)
"""
)
CATCHES = """
for _ in range(0 if last else 2):
    try: mpitrain.all_reduce(tf.zeros(2))
    except mpitrain.errors.RankFinishedError: print("caught", flush=True)
"""


@mpich
def test_a_rank_that_ends_early_leaves_nobody_waiting(mpirun: Mpirun, tmp_path: Path) -> None:
    """What cannot go on without it may be caught, and the job still ends well."""
    finished = run(mpirun, tmp_path, LOOPS % 2 + CATCHES)
    assert finished.returncode == 0, finished.output
    assert finished.stdout.count("caught") == 2, finished.output
    assert finished.stdout.count("rank 1 made 2 steps") == 4, finished.output
    # Six full steps, though from the third on one rank had nothing to say.
    for way in ("optimizer False", "optimizer True", "tape False", "tape True"):
        assert f"rank 0 made 6 steps {way} at {1 - 0.8**6:.4f}" in finished.stdout, finished.output


@mpich
def test_a_rank_that_ends_without_any_update_is_named(mpirun: Mpirun, tmp_path: Path) -> None:
    finished = run(mpirun, tmp_path, LOOPS % 0)
    assert finished.returncode not in (0, 124), finished.output
    assert "RankFinishedError" in finished.stderr, finished.output
    assert re.search(r"rank 1 \(\S+\) will not come: at the end of the program", finished.stderr), finished.output


@mpich
def test_a_collective_after_a_rank_has_ended_is_a_named_error(mpirun: Mpirun, tmp_path: Path) -> None:
    code = START + "if last: sys.exit()\n" + "print(mpitrain.all_reduce_obj(1, max), mpitrain.barrier())\n"
    finished = run(mpirun, tmp_path, code, np=3)
    assert finished.returncode not in (0, 124), finished.output
    assert "RankFinishedError: ranks 0, 1 (" in finished.stderr, finished.output
    assert "called all_gather_obj, but rank 2 (" in finished.stderr, finished.output


@mpich
def test_the_exit_code_of_a_rank_is_the_jobs(mpirun: Mpirun, tmp_path: Path) -> None:
    finished = run(mpirun, tmp_path, START + "sys.exit(3 if last else 0)\n")
    assert finished.returncode == 3, finished.output


def test_an_exit_within_fit_names_the_rank_that_left(mpirun: Mpirun, tmp_path: Path) -> None:
    leaves = """
class Leaves(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if last and batch == 1: sys.exit(0)
train(data, [Leaves()])
"""
    finished = run(mpirun, tmp_path, KERAS + leaves, np=3)
    assert finished.returncode == 1, finished.output
    told = re.findall(r"^mpitrain: (?!warning)(.*)", finished.stderr, re.MULTILINE)
    assert len(told) == 1, finished.output
    assert re.fullmatch(
        r"rank 2 on \S+ called sys\.exit\(0\) while others went on; the job ends with exit code 1", told[0]
    )
    assert "RankFinishedError: ranks 0, 1 (" in finished.stderr, finished.output


def test_a_fit_with_the_same_data_an_evaluation_on_one_rank_and_a_nan(mpirun: Mpirun) -> None:
    program = str(Path(__file__).with_name("fit_program.py"))
    env = {"PYTHONPATH": str(ROOT), "MPITRAIN_STALL_WARNING": str(WARNING), "TF_CPP_MIN_LOG_LEVEL": "3"}
    finished, _ = finish(mpirun.start(2, [program], env=env))
    assert finished.returncode == 1, finished.output
    assert re.search(r"evaluated for ([6-9]|\d\d)\.\d s", finished.stdout), finished.output
    assert "stall" not in finished.stderr, finished.output
    assert finished.stderr.count("warning: ranks 0, 1 had the same first 3 batches") == 1, finished.output
    assert re.search(
        r"^mpitrain: ranks 0, 1 on \S+ failed; the job ends\nNonFiniteError: ", finished.stderr, re.MULTILINE
    )
    # The 41st sample of the second epoch: 16 updates before, and the eleventh of that one.
    assert re.search(r"in update 27 \(update by .*: first in \S+ on rank 1 \(\S+\) \(\d+ NaN", finished.stderr), (
        finished.output
    )
