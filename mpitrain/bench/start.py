"""What mpitrain adds to the time a job needs before its first step can be built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from mpitrain.bench.interleave import interleave
from mpitrain.bench.processes import Mpirun
from mpitrain.bench.report import Row, median

# Each is timed inside the process, from its first line on: what the launcher and the interpreter
# need is the same for all. The ranks' times are gathered afterwards, on MPI as it then is.
_BEFORE = "import time, json, os\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\nstart = time.perf_counter()\n"
_AFTER = (
    "seconds = time.perf_counter() - start\n"
    "from mpi4py import MPI\n"
    "ranks = MPI.COMM_WORLD.allgather(seconds)\n"
    "if MPI.COMM_WORLD.Get_rank() == 0: print(json.dumps(ranks), flush=True)\n"
)
WAYS = {
    "mpi_tensorflow_seconds": "from mpi4py import MPI\nimport tensorflow\n",
    "init_tensorflow_seconds": "import mpitrain\nmpitrain.init()\nimport tensorflow\n",
    "mpi_keras_seconds": "from mpi4py import MPI\nimport tensorflow\nimport keras\nkeras.optimizers.SGD()\n",
    "mpitrain_keras_seconds": (
        "import mpitrain\nmpitrain.init()\nimport tensorflow\nimport keras\n"
        "mpitrain.DistributedOptimizer(keras.optimizers.SGD())\nmpitrain.callbacks.DataParallel\n"
    ),
}


def measure(mpirun: Mpirun, ranks: int, repeat: int) -> Iterator[Row]:
    """Local: one row, from jobs that start in four ways in alternation; the slowest rank counts.

    Two pairs are compared: MPI and TensorFlow with and without `mpitrain.init()`, and the same with Keras, an
    optimizer, and everything `fit` needs of mpitrain. A job of the last way comes first and is not counted (it fills
    the page cache).
    """

    def seconds(code: str) -> list[float]:
        return [max(mpirun.run(ranks, _BEFORE + code + _AFTER))]

    turns: dict[str, Callable[[], list[float]]] = {way: partial(seconds, code) for way, code in WAYS.items()}
    turns["mpitrain_keras_seconds"]()
    raw = interleave(turns, repeat)
    medians = {way: median(values) for way, values in raw.items()}
    figures: dict[str, float | None] = {
        "MPI + TensorFlow s": medians["mpi_tensorflow_seconds"],
        "with mpitrain.init s": medians["init_tensorflow_seconds"],
        "init adds s": medians["init_tensorflow_seconds"] - medians["mpi_tensorflow_seconds"],
        "MPI + TensorFlow + Keras s": medians["mpi_keras_seconds"],
        "with all of mpitrain s": medians["mpitrain_keras_seconds"],
        "all adds s": medians["mpitrain_keras_seconds"] - medians["mpi_keras_seconds"],
    }
    yield Row({"ranks": ranks}, raw, figures)
