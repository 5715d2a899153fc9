"""Thread pools from the cores of a host and the ranks that share them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpitrain.errors import UsageError
from mpitrain.runtime.threads import ThreadPlan, available_cores, plan
from tests.unit.fresh import ROOT, printed


def cores(count: int, first: int = 0) -> frozenset[int]:
    return frozenset(range(first, first + count))


@pytest.mark.parametrize(
    ("host", "local_rank", "intra", "inter"),
    [
        ([cores(8)], 0, 8, 8),
        ([cores(1)], 0, 1, 2),
        ([cores(2)] * 2, 1, 1, 2),
        ([cores(2)] * 8, 5, 1, 2),
        ([cores(16)] * 4, 3, 4, 4),
        ([cores(5)] * 2, 0, 2, 2),
        ([cores(3)] * 3, 0, 1, 2),
        ([cores(4), cores(4, 4)], 0, 4, 4),
        ([cores(1), cores(1, 1)], 1, 1, 2),
        # half of the host for two ranks, the other half for one
        ([cores(8), cores(8), cores(8, 8)], 0, 4, 4),
        ([cores(8), cores(8), cores(8, 8)], 2, 8, 8),
        # the second is bound to two of the first's cores
        ([cores(8), cores(2)], 0, 7, 7),
        ([cores(8), cores(2)], 1, 1, 2),
    ],
)
def test_shares(host: list[frozenset[int]], local_rank: int, intra: int, inter: int) -> None:
    assert plan(host, local_rank, None, None, environ={}) == ThreadPlan(intra, inter, intra)


@pytest.mark.parametrize("ranks", range(1, 50))
def test_shares_are_exact(ranks: int) -> None:
    assert plan([cores(3 * ranks)] * ranks, 0, None, None, environ={}).intra == 3


@pytest.mark.parametrize(
    ("intra", "inter", "environ", "expected"),
    [
        (3, None, {}, (3, 4)),
        (None, 1, {}, (4, 1)),
        (7, 5, {}, (7, 5)),
        (None, None, {"TF_NUM_INTRAOP_THREADS": "6", "TF_NUM_INTEROP_THREADS": "9"}, (6, 9)),
        (3, 3, {"TF_NUM_INTRAOP_THREADS": "6", "TF_NUM_INTEROP_THREADS": "9"}, (3, 3)),
        (None, None, {"TF_NUM_INTRAOP_THREADS": "0", "TF_NUM_INTEROP_THREADS": "x"}, (4, 4)),
    ],
)
def test_what_is_asked_for_wins(
    intra: int | None, inter: int | None, environ: dict[str, str], expected: tuple[int, int]
) -> None:
    chosen = plan([cores(4)], 0, intra, inter, environ)
    assert (chosen.intra, chosen.inter) == expected


@pytest.mark.parametrize(("intra", "inter"), [(0, None), (None, 0), (-1, 2)])
def test_no_threads_is_an_error(intra: int | None, inter: int | None) -> None:
    with pytest.raises(UsageError, match="expected at least 1"):
        plan([cores(4)], 0, intra, inter, {})


def test_environment() -> None:
    pools = {"TF_NUM_INTRAOP_THREADS": "2", "TF_NUM_INTEROP_THREADS": "3"}
    assert plan([cores(4)], 0, 2, 3, {}).environment == {**pools, "OMP_NUM_THREADS": "2"}
    assert plan([cores(4)], 0, 2, 3, {"OMP_NUM_THREADS": "8"}).environment == pools


def test_environment_of_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert "OMP_NUM_THREADS" not in plan([cores(4)], 0, 2, 3).environment
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert plan([cores(4)], 0, 2, 3).environment["OMP_NUM_THREADS"] == "2"


def test_available_cores_follow_the_binding() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{core}])\n"
        "from mpitrain.runtime.threads import available_cores; print(sorted(available_cores()))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert finished.stdout.strip() == f"[{core}]"
    assert available_cores() == os.sched_getaffinity(0)


def test_tensorflow_heeds_the_environment() -> None:
    """TensorFlow does not tell the sizes of its pools when they come from variables: count threads."""
    code = (
        "import pathlib, tensorflow as tf\n"
        "tf.function(lambda x: x @ x)(tf.ones((64, 64)))\n"
        "names = [p.read_text().strip() for p in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print(names.count('tf_Compute'))"
    )
    for inter in (3, 6):
        chosen = plan([cores(2)], 0, 2, inter, {})
        assert int(printed(code, chosen.environment)) == inter
