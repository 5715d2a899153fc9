"""Each benchmark runs, prints its table on rank 0 only, and writes its raw numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.bench.processes import Mpirun as OwnJobs
from mpitrain.bench.workload import PARAMETERS
from tests.launch.conftest import REPOSITORY, Finished, Mpirun

BENCH = ("-m", "mpitrain", "bench")
SECONDS = 800


def table(output: str) -> list[dict[str, str]]:
    """The rows of the Markdown table in a job's output."""
    lines = [line.strip("| ").split("|") for line in output.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells, output
    assert all(cell == "---:" for cell in cells[1]), output
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def check(finished: Finished, path: Path, benchmark: str) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    """What every run has to fulfil; the printed and the written rows."""
    assert finished.returncode == 0, finished.output
    report = json.loads(path.read_text())
    assert report["benchmark"] == benchmark
    assert report["setting"]["versions"]["keras"]
    printed, written = table(finished.stdout), report["rows"]
    assert len(printed) == len(written) > 0
    for shown, row in zip(printed, written, strict=True):
        assert list(shown) == [*row["case"], *row["figures"]]
        assert all(values and all(math.isfinite(v) for v in values) for values in row["raw"].values()), row
        assert all(math.isfinite(value) for value in row["figures"].values() if value is not None), row
    return printed, written


def in_one_job(mpirun: Mpirun, np: int, *arguments: str) -> Finished:
    return mpirun(np, [*BENCH, *arguments], timeout=SECONDS)


def with_own_jobs(mpirun: Mpirun, *arguments: str) -> Finished:
    launcher = " ".join([mpirun.path, *mpirun.flags(2)])
    command = (sys.executable, *BENCH, *arguments, "--mpirun", launcher)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=REPOSITORY, check=False)
    return Finished(command, done.returncode, done.stdout, done.stderr, 0.0)


# Several benchmarks in one job, for TensorFlow to be loaded once; rank 0 says where the output of each ends.
SEVERAL = """
import json, sys
import mpitrain
from mpitrain.cli.main import main
codes = []
for arguments in json.loads(sys.argv[1]):
    codes.append(main(["bench", *arguments]))
    if mpitrain.init().is_root: print("END", flush=True)
sys.exit(max(codes))
"""


def several(mpirun: Mpirun, np: int, commands: list[list[str]]) -> list[Finished]:
    """What each of the benchmarks printed."""
    finished = mpirun(np, ["-c", SEVERAL, json.dumps(commands)], timeout=SECONDS)
    *parts, rest = finished.stdout.split("END\n")
    assert (len(parts), rest) == (len(commands), ""), finished.output
    return [replace(finished, stdout=part) for part in parts]


def test_exchange_eager_and_step(mpirun: Mpirun, tmp_path: Path) -> None:
    paths = {name: tmp_path / "new" / f"{name}.json" for name in ("exchange", "eager", "step")}
    few = {
        "exchange": ("--mebibytes", "0.25,1", "--tensors", "1,3", "--rate", "1e9", "--repeat", "2"),
        "eager": ("--bytes", "4", "--repeat", "2"),
        "step": ("--models", "mlp50k", "--repeat", "2", "--block-seconds", "0.01"),
    }
    ran = several(mpirun, 2, [[name, *few[name], "--json", str(paths[name])] for name in few])
    exchange, eager, step = (check(finished, paths[name], name) for finished, name in zip(ran, few, strict=True))
    check_exchange(*exchange)
    check_eager(*eager)
    check_step(*step)


def check_exchange(printed: list[dict[str, str]], written: list[dict[str, Any]]) -> None:
    assert [(row["MiB"], row["tensors"]) for row in printed] == [
        ("0.25", "1"), ("0.25", "3"), ("1", "1"), ("1", "3"),
    ]  # fmt: skip
    assert {len(values) for row in written for values in row["raw"].values()} == {2}
    assert float(printed[2]["limit ms"]) == pytest.approx((1 << 20) * 8 / 1e9 * 1e3, abs=1e-3)


def check_eager(printed: list[dict[str, str]], written: list[dict[str, Any]]) -> None:
    assert [row["bytes"] for row in printed] == ["4"]
    assert {len(values) for values in written[0]["raw"].values()} == {2}


def check_step(printed: list[dict[str, str]], written: list[dict[str, Any]]) -> None:
    assert [row["parameters"] for row in printed] == [str(PARAMETERS["mlp50k"])]
    # Otherwise nothing was exchanged.
    assert float(printed[0]["exchange ms"]) > 0
    counts = {mode: len(written[0]["raw"][f"{mode}_seconds"]) for mode in ("alone", "together", "exchanged")}
    assert len(set(counts.values())) == 1
    assert counts["alone"] >= 4


def test_parameter_servers_and_ordering(mpirun: Mpirun, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("ps", "straggler", "ordering")}
    few = {
        "ps": ("--mebibytes", "0.25", "--peer"),
        "straggler": ("--compute-seconds", "0.02", "--seconds", "1"),
        "ordering": ("--mebibytes", "0.25", "--tensors", "4", "--windows", "1,2", "--work-seconds", "0.001"),
    }
    ran = several(mpirun, 4, [[name, *few[name], "--repeat", "1", "--json", str(paths[name])] for name in few])
    found = {name: check(finished, paths[name], name)[0] for finished, name in zip(ran, few, strict=True)}
    [row] = found["ps"]
    assert (row["MiB"], row["workers"], row["servers"]) == ("0.25", "3", "1")
    assert float(row["ParameterServerStrategy ms"]) > 0
    shares = {row["way"]: float(row["share"]) for row in found["straggler"]}
    assert shares["sync"] <= 0.3 + 0.05  # all wait for the slow one, which makes a fifth of the steps
    assert shares["async"] > shares["sync"], shares
    assert len(found["ordering"]) >= 2


def test_peers(mpirun: Mpirun, tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    few = ("--models", "mlp50k", "--repeat", "1", "--block-seconds", "0.01")
    [row], _ = check(in_one_job(mpirun, 2, "peers", *few, "--json", str(path)), path, "peers")
    assert float(row["MultiWorkerMirroredStrategy ms"]) > 0


def test_memory(mpirun: Mpirun, tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    few = ("--models", "mlp50k", "--repeat", "1", "--ranks", "2")
    [row], _ = check(with_own_jobs(mpirun, "memory", *few, "--json", str(path)), path, "memory")
    assert float(row["alone MiB"]) > 100
    assert float(row["largest bucket MiB"]) == pytest.approx(PARAMETERS["mlp50k"] * 4 / (1 << 20), rel=0.01)


def test_start(mpirun: Mpirun, tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    [row], _ = check(
        with_own_jobs(mpirun, "start", "--ranks", "1", "--repeat", "1", "--json", str(path)), path, "start"
    )
    assert float(row["MPI + TensorFlow s"]) > 0.1


def test_recovery(mpirun: Mpirun, tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    few = ("--models", "mlp50k", "--repeat", "1", "--run-args", "--allow-run-as-root --start-timeout 120")
    command = (sys.executable, *BENCH, "recovery", *few, "--json", str(path))
    [row], _ = check(mpirun.execute(command).finish(SECONDS), path, "recovery")
    assert 0 < float(row["restart: noticed s"]) < float(row["restart: begun s"]) < float(row["restart: next step s"])
    assert not mpirun.is_open_mpi or 0 < float(row["shrink: next step s"]) < float(row["restart: next step s"])


def test_one_rank_is_refused(mpirun: Mpirun) -> None:
    names = ("exchange", "step", "peers")
    refused = several(mpirun, 1, [[name] for name in names])
    assert [finished.stdout for finished in refused] == [""] * 3
    assert refused[0].returncode == 2
    assert refused[0].stderr.count("needs two ranks or more") == 3, refused[0].output


def test_a_job_that_fails_is_told(mpirun: Mpirun) -> None:
    with pytest.raises(Exception, match="the cause"):
        OwnJobs((mpirun.path, *mpirun.flags(2))).run(2, "raise SystemExit('the cause')")
