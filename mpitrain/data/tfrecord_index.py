"""Where each record of a TFRecord file lies, so that any rank can fetch any record.

A record is a uint64 length, 4 bytes of checksum of it, the data, and 4 bytes of checksum
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.errors import DataError

HEADER_BYTES = 12
FOOTER_BYTES = 4
GZIP_START = b"\x1f\x8b"


@dataclass(frozen=True)
class RecordIndex:
    """For each record: the number of its file, where its data begin, and how many bytes they are."""

    files: tuple[Path, ...]
    file_of: NDArray[np.int64]
    offset_of: NDArray[np.int64]
    bytes_of: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.file_of)

    def name(self, position: int) -> str:
        """Local: file and number of a record, to begin a sentence with."""
        number = int(self.file_of[position])
        return f"{self.files[number]}: record {position - int(np.searchsorted(self.file_of, number))}"

    def place(self, position: int) -> str:
        """Local: the same within a sentence."""
        file, _, record = self.name(position).rpartition(": ")
        return f"{record} of {file}"

    def read(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """The data of some records, each file opened once; shape (positions,), dtype object (bytes)."""
        data = np.empty(len(positions), object)
        with ExitStack() as stack:
            opened: dict[int, int] = {}
            for place, position in enumerate(positions):
                number = int(self.file_of[position])
                if number not in opened:
                    opened[number] = os.open(self.files[number], os.O_RDONLY)
                    stack.callback(os.close, opened[number])
                data[place] = os.pread(opened[number], int(self.bytes_of[position]), int(self.offset_of[position]))
        return data


def index_records(files: Sequence[Path]) -> RecordIndex:
    """Find all records by hopping from one length to the next; no data are read.

    Raises:
        DataError: a file is empty, compressed, cut off, or no TFRecord file.
    """
    found = [(number, offset, length) for number, file in enumerate(files) for offset, length in _records(file)]
    columns = np.asarray(found, np.int64).reshape(-1, 3).T
    return RecordIndex(tuple(files), columns[0], columns[1], columns[2])


def _records(path: Path) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    try:
        end = path.stat().st_size
        with path.open("rb") as file:
            position = 0
            while position < end:
                file.seek(position)
                header = file.read(HEADER_BYTES)
                if position == 0:
                    _check_not_packed(header, path)
                length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER_BYTES else end
                following = position + HEADER_BYTES + length + FOOTER_BYTES
                if following > end:
                    raise DataError(
                        f"{path} is cut off in record {len(found)}, or no TFRecord file: copy it again, or write it "
                        "with tf.io.TFRecordWriter"
                    )
                found.append((position + HEADER_BYTES, length))
                position = following
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check that it is a file you may read") from error
    if not found:
        raise DataError(f"{path} is empty: write at least one record, or remove the file")
    return found


def _check_not_packed(start: bytes, path: Path) -> None:
    """GZIP and ZLIB, as `tf.io.TFRecordWriter` writes them."""
    if start.startswith(GZIP_START):
        raise DataError(f"{path} is compressed, so single records cannot be fetched: unpack it (gunzip < FILE)")
    # A length of records begins with these two bytes now and then, but then its upper bytes are 0.
    if start[:1] == b"\x78" and int.from_bytes(start[:2], "big") % 31 == 0 and any(start[4:8]):
        raise DataError(
            f"{path} is compressed (ZLIB), so single records cannot be fetched: write it without compression, "
            "tf.io.TFRecordWriter(path)"
        )
