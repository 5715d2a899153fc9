"""Where each record of a TFRecord file lies."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from mpitrain.data.tfrecord_index import index_records
from mpitrain.errors import DataError

CONTENTS = [[b"one", b"", b"three" * 100], [b"x" * 0x9C78]]  # of two files


def written(directory: Path) -> list[Path]:
    paths = [directory / f"{number}.tfrecord" for number in range(len(CONTENTS))]
    for path, records in zip(paths, CONTENTS, strict=True):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
    return paths


def test_any_record_is_fetched_from_where_it_lies(tmp_path: Path) -> None:
    paths = written(tmp_path)
    index = index_records(paths)
    flat = [record for records in CONTENTS for record in records]
    assert len(index) == len(flat)
    for order in ([0, 1, 2, 3], [3, 0, 3, 2], []):
        assert index.read(np.array(order, np.int64)).tolist() == [flat[place] for place in order]
    assert index.name(2) == f"{paths[0]}: record 2"
    assert index.place(3) == f"record 0 of {paths[1]}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b" + bytes(30), "is compressed, so single records"),
        (zlib.compress(b"a" * 100), r"is compressed \(ZLIB\)"),
        (struct.pack("<Q", 5) + bytes(4 + 5 + 3), "is cut off in record 0"),
        (bytes(7), "is cut off in record 0"),
    ],
    ids=["empty", "gzip", "zlib", "cut off", "no header"],
)
def test_what_is_no_such_file(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=words):
        index_records([tmp_path / "file"])


def test_a_second_record_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is cut off in record 2"):
        index_records([path])
    with pytest.raises(DataError, match="cannot be read"):
        index_records([tmp_path / "absent"])
