"""The command horovodrun in the words of `mpitrain run`, and the small helpers of Horovod's launchers and loaders."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpitrain.horovod
from mpitrain.cli import horovodrun, script
from mpitrain.errors import UsageError
from mpitrain.horovod import alias
from mpitrain.horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from mpitrain.horovod.runner.common.util import host_hash, hosts

HERE = "run --allow-run-as-root --oversubscribe"
THERE = "run --allow-run-as-root"


def words(line: str) -> list[str]:
    return horovodrun.command(horovodrun._parser().parse_args(line.split()))[0]


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("-np 2 python train.py --epochs 3", f"{HERE} -np 2 --as-horovod train.py --epochs 3"),
        ("-np 2 python3.11 -u -m package.train -v", f"{HERE} -np 2 --as-horovod -m package.train -v"),
        ("--num-proc 2 ./train.py", f"{HERE} -np 2 --as-horovod ./train.py"),
        ("-np 2 bash train.sh", f"{HERE} -np 2 -- bash train.sh"),
        (
            "-np 4 -H a:2,b:2 -p 2222 -i key --start-timeout 60 --network-interfaces eth0 --verbose python t.py",
            f"{THERE} --verbose -np 4 -H a:2,b:2 -p 2222 -i key --start-timeout 60 "  # noqa: ISC004
            "--network-interfaces eth0 --as-horovod t.py",
        ),
        (
            "-np 2 --hostfile h --output-filename out --timeline-filename t.json --timeline-mark-cycles python t.py",
            f"{THERE} -np 2 --hostfile h --output-filename out "  # noqa: ISC004
            "-x HOROVOD_TIMELINE_MARK_CYCLES=1 -x HOROVOD_TIMELINE=t.json --as-horovod t.py",
        ),
        (
            "-np 2 --stall-check-warning-time-seconds 9 --stall-check-shutdown-time-seconds 90 python t.py",
            f"{HERE} -np 2 -x MPITRAIN_STALL_WARNING=9 -x MPITRAIN_STALL_ABORT=90 --as-horovod t.py",
        ),
        (
            "-np 2 --no-stall-check python t.py",
            f"{HERE} -np 2 -x MPITRAIN_STALL_WARNING=0 -x MPITRAIN_STALL_ABORT=0 --as-horovod t.py",
        ),
        (
            "-np 4 --min-np 2 --max-np 4 python t.py",
            f"{HERE} -np 4 --on-failure shrink --min-np 2 --as-horovod t.py",
        ),
        ("-np 2 --mpi-args=--tag python t.py", f"{HERE} -np 2 --mpi-args=--tag  --as-horovod t.py"),
    ],
)
def test_what_is_started(given: str, started: str) -> None:
    assert " ".join(words(given)) == started


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("-np 2", "what is to be run"),
        ("-np 2 python", "give a script"),
        ("-np 2 python -c pass", "give a script"),
        ("-np 2 --host-discovery-script d.sh python t.py", "-H or --hostfile"),
        ("-np 2 --config-file c.yaml python t.py", "as options"),
        ("-np 2 --nonsense python t.py", "unrecognized arguments: --nonsense"),
    ],
)
def test_what_is_refused(given: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert horovodrun.main(given.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("horovodrun: ")
    assert told in error
    assert error.count("\n") == 1


def test_what_has_no_effect_is_told() -> None:
    line = "-np 2 --fusion-threshold-mb 64 --gloo --log-level INFO --autotune python t.py"
    started, useless = horovodrun.command(horovodrun._parser().parse_args(line.split()))
    assert started == [*HERE.split(), "-np", "2", "--as-horovod", "t.py"]
    assert useless == ["--fusion-threshold-mb", "--log-level", "--autotune", "--gloo"]


def test_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert horovodrun.main(["--check-build"]) == 0
    assert "[X] TensorFlow\n    [ ] PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "own", "rest"),
    [
        ("--as-horovod python x.py a", "--as-horovod", "x.py a"),
        ("--output python python -u x.py", "--output python", "x.py"),
        ("/usr/bin/python3.12 -m a.b", "", "-m a.b"),
        ("python -O x.py", "python -O x.py", ""),
        ("python", "python", ""),
    ],
)
def test_python_before_a_script(given: str, own: str, rest: str) -> None:
    assert script.divide(given.split()) == (own.split(), rest.split())


def test_hosts(tmp_path: Path) -> None:
    found = hosts.parse_hosts("a:2,b:1")
    assert found == [hosts.HostInfo("a", 2), hosts.HostInfo.from_string("b:1")]
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb\n")
    assert hosts.parse_host_files(str(path)) == "a:2,b:1"
    slots = hosts.get_host_assignments(found, 2, 3)
    assert slots == [
        hosts.SlotInfo("a", 0, 0, 0, 3, 2, 2),
        hosts.SlotInfo("a", 1, 1, 0, 3, 2, 1),
        hosts.SlotInfo("b", 2, 0, 1, 3, 1, 2),
    ]
    with pytest.raises(ValueError, match="as many slots"):
        hosts.get_host_assignments(found, 4)
    assert host_hash.host_hash() == host_hash.host_hash() != host_hash.host_hash("salt")


def test_run_says_what_takes_its_place() -> None:
    with pytest.raises(UsageError, match="mpitrain run -np N --as-horovod"):
        mpitrain.horovod.run(words, np=2)


class Squares(BaseDataLoader):
    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.bad:
                raise OSError("a bad sample")
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return batch**2


class SquaresAhead(AsyncDataLoaderMixin, Squares):
    pass


@pytest.mark.parametrize("size", [0, 1, 3, 64])
def test_loader_that_makes_batches_ahead(size: int) -> None:
    loader = SquaresAhead(size, 9)
    for _ in range(2):
        assert list(loader) == list(Squares(9)) == [number**2 for number in range(9)]
    for _ in loader:
        break
    loader.close_async_loader()
    assert all(thread.name != "batches" for thread in threading.enumerate())
    with pytest.raises(OSError, match="a bad sample"):
        list(SquaresAhead(size, 9, bad=5))


@pytest.mark.parametrize(
    ("file", "installed"),
    [("horovod.py", False), ("horovod/train.py", False), ("horovod/tensorflow/__init__.py", True)],
)
def test_a_script_or_folder_of_that_name_is_not_horovod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, file: str, installed: bool
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert alias._is_installed() is installed
