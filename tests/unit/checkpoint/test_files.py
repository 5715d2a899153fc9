"""A checkpoint is read as it was written, or not at all."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.checkpoint import files
from mpitrain.checkpoint.files import ARRAYS, DTYPES, MANIFEST, MODEL, DamagedError, Snapshot
from mpitrain.checkpoint.store import Quality, Store, read_one
from mpitrain.checkpoint.writer import BackgroundWriter
from mpitrain.errors import UsageError


def example() -> Snapshot:
    arrays: dict[str, Any] = {
        "kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
        "empty": np.empty((0, 3), np.float16),
        "number": np.asarray(7, np.int64),
        "half": np.asarray([1.5, -2], ml_dtypes.bfloat16),
        "strided": np.arange(10, dtype=np.uint32)[::3],
    }
    return Snapshot(arrays, {"epoch": 3, "loss": [0.5, 0.25], "text": "ä\n"})


def write_model(path: Path) -> None:
    path.write_bytes(b"a model of some program")


@pytest.fixture(scope="module")
def written() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint-000001"
        files.write(path, example(), write_model)
        yield path


def same(found: Snapshot, expected: Snapshot) -> bool:
    return dict(found.info) == dict(expected.info) and all(
        found.arrays[name].dtype == array.dtype
        and found.arrays[name].shape == array.shape
        and found.arrays[name].tobytes() == array.tobytes()
        for name, array in expected.arrays.items()
    )


def test_is_read_as_written(written: Path) -> None:
    assert same(files.read(written), example())
    assert files.read_info(written) == example().info
    assert json.loads((written / MANIFEST).read_text())["format"] == files.FORMAT
    assert sorted(path.name for path in written.parent.iterdir()) == [written.name]
    assert [path.stat().st_mode & 0o7 for path in (written, *written.iterdir())] == [0, 0, 0, 0]


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3), st.binary(max_size=64))
def test_every_type_and_shape(name: str, shape: list[int], seed: bytes) -> None:
    array: Any = np.resize(np.frombuffer(seed + b"x", np.uint8), (*shape, DTYPES[name].itemsize)).copy()
    array = (array & 1 if name == "bool" else array).view(DTYPES[name]).reshape(shape)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "one"
        files.write(path, Snapshot({"array": array, "again": array}))
        assert same(files.read(path), Snapshot({"array": array, "again": array}))


@pytest.mark.parametrize("array", [np.asarray(["text"]), np.asarray([{}], object), np.zeros(2, "V3,i4")])
def test_what_is_no_number_is_refused(tmp_path: Path, array: Any) -> None:
    with pytest.raises(TypeError, match="odd is of type"):
        files.write(tmp_path / "one", Snapshot({"odd": array}))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def copy(written: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(shutil.copytree(written, Path(directory) / written.name))


@given(data=st.data(), name=st.sampled_from([ARRAYS, MANIFEST, MODEL]))
def test_a_changed_or_lost_byte_is_noticed(copy: Path, data: st.DataObject, name: str) -> None:
    path = copy / name
    good = path.read_bytes()
    place = data.draw(st.integers(0, len(good) - 1))
    mask = data.draw(st.integers(1, 255))
    flipped = bytearray(good)
    flipped[place] ^= mask
    try:
        for bad in (bytes(flipped), good[:place], good + bytes([mask]), good[:place] + good[place + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(DamagedError, match=name):
                files.read(copy)
        path.unlink()
        with pytest.raises(DamagedError, match=f"{name} cannot be read"):
            files.read(copy)
    finally:
        path.write_bytes(good)
    assert same(files.read(copy), example())


def test_every_bit_of_the_manifest_counts(copy: Path) -> None:
    path = copy / MANIFEST
    good = path.read_bytes()
    for place in range(0, 8 * len(good), 3):
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(DamagedError):
            files.read(copy)
    path.write_bytes(good)


@pytest.mark.parametrize(
    "body",
    [
        "[" * 100_000,
        "[]",
        '{"files": {}, "arrays": [], "info": 3}',
        '{"files": {"../arrays.bin": {"bytes": 0, "sha256": ""}}, "arrays": [], "info": {}}',
        '{"files": [], "arrays": [], "info": {}}',
        '{"files": {}, "arrays": [{"name": "a", "dtype": "object", "shape": [], "offset": 0, "bytes": 8}], "info": {}}',
        '{"files": {}, "arrays": [{"name": "a", "dtype": "int8", "shape": [4], "offset": 0, "bytes": 4}], "info": {}}',
        '{"files": {}, "arrays": [{"name": "a", "dtype": "int8", "shape": [-1], "offset": 0, "bytes": 1}], "info": {}}',
        '{"files": {}, "arrays": [{"name": "a"}], "info": {}}',
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_content(tmp_path: Path, body: str) -> None:
    rest = body[1:].encode()
    (tmp_path / MANIFEST).write_bytes(files._first_line(rest) + rest)
    with pytest.raises(DamagedError):
        files.read(tmp_path)


def test_the_newest_whole_one_is_chosen_and_damaged_ones_are_told(tmp_path: Path) -> None:
    store, told = Store(tmp_path / "new", keep=5), list[str]()
    store.prepare()
    assert store.newest(told.append) is None
    for number in range(4):
        store.write(Snapshot({}, {"number": number}))
    paths = store.paths()
    (paths[3] / ARRAYS).unlink()
    (paths[2] / MANIFEST).write_bytes((paths[2] / MANIFEST).read_bytes()[:-1])
    found = store.newest(told.append)
    assert found is not None
    assert (found[0], found[1].info) == (paths[1], {"number": 1})
    assert len(told) == 2
    assert "checkpoint-000004 is damaged and left out" in told[0]
    for path in paths[:2]:
        (path / MANIFEST).unlink()
    with pytest.raises(UsageError, match=r"none of 4 checkpoints in .* is whole: give another --checkpoint-dir"):
        store.newest(told.append)
    with pytest.raises(UsageError, match=r"checkpoint-000001 cannot be resumed from: .*: name another check"):
        read_one(paths[0])


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for value in (0.5, 0.2, 0.4, 0.2, 0.3, float("nan")):
        store.write(Snapshot({}, {"quality": {"metric": "val_loss", "value": value}}))
    assert [path.name for path in store.paths()] == ["checkpoint-000002", "checkpoint-000005", "checkpoint-000006"]
    best = store.best()
    assert best is not None
    assert best[1] == Quality("val_loss", 0.2)


@pytest.mark.parametrize(
    ("metric", "rises"),
    [("val_accuracy", True), ("binary_accuracy", True), ("auc", True), ("loss", False), ("val_mae", False)],
)
def test_which_metrics_rise(metric: str, rises: bool) -> None:
    assert (Quality(metric, 2.0).cost < Quality(metric, 1.0).cost) == rises
    assert Quality(metric, float("nan")).cost == float("inf")


def test_leftovers_of_a_killed_run_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(Snapshot({}))
    (tmp_path / ".part-checkpoint-000002-host-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    store.prepare()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "notes.txt"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"no checkpoint can be written in .*give another --checkpoint-dir"):
        Store(tmp_path / "file" / "below").prepare()


KILLED = """
import sys, numpy as np
from pathlib import Path
from mpitrain.checkpoint.files import Snapshot
from mpitrain.checkpoint.store import Store
store, number = Store(Path(sys.argv[1]), keep=2), 0
print("ready", flush=True)
while True:
    number += 1
    store.write(Snapshot({str(i): np.full(200_000, number) for i in range(5)}, {"number": number}))
"""


@pytest.mark.parametrize("after_seconds", [0.05, 0.11, 0.17, 0.23])
def test_killed_at_any_moment_a_whole_one_is_left(tmp_path: Path, after_seconds: float) -> None:
    Store(tmp_path).write(Snapshot({"0": np.zeros(1)}, {"number": 0}))
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(after_seconds)
        process.send_signal(signal.SIGKILL)
    store, told = Store(tmp_path), list[str]()
    store.prepare()
    found = store.newest(told.append)
    assert found is not None
    number = found[1].info["number"]
    assert all((array == number).all() for array in found[1].arrays.values())
    assert told == []
    assert not list(tmp_path.glob(".part-*"))


FULL = """
import resource, sys, numpy as np
from pathlib import Path
from mpitrain.checkpoint.files import Snapshot
from mpitrain.checkpoint.store import Store
from mpitrain.checkpoint.writer import BackgroundWriter
store = Store(Path(sys.argv[1]))
writer = BackgroundWriter(print)
def write(n): return lambda: store.write(Snapshot({"x": np.zeros(n, np.uint8)}))
writer.start(write(1000))
print(writer.wait())
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
writer.start(write(1_000_000))
print(writer.wait())
writer.start(write(2000))
print(writer.wait(), [path.name for path in store.paths()], len(list(store.directory.iterdir())))
"""


def test_a_full_disk_is_told_and_the_checkpoints_before_stay(tmp_path: Path) -> None:
    finished = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    lines = finished.stdout.splitlines()
    assert lines[0] == "True"
    assert lines[1].startswith("NO CHECKPOINT WAS WRITTEN: File too large, after "), finished.stdout
    assert "the checkpoints before are untouched" in lines[1]
    assert lines[2:] == ["False", "True ['checkpoint-000001', 'checkpoint-000002'] 2"]


def test_the_writer_waits_for_the_job_before() -> None:
    writer, done = BackgroundWriter(print), list[int]()

    def slow() -> None:
        time.sleep(0.2)
        done.append(1)

    writer.start(slow)
    assert writer.busy
    assert not writer.wait(0.01)
    writer.start(lambda: done.append(2))
    assert writer.wait()
    assert done == [1, 2]
