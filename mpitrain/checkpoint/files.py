"""The files of one checkpoint: numbers as raw bytes, everything else as JSON. No TensorFlow, and no code to run.

A checkpoint is a directory:

- `arrays.bin`: the arrays, one after the other, each beginning at a multiple of 64 bytes;
- `model.keras`: the model as Keras saves it, if it can be saved; never read here;
- `manifest.json`: JSON whose first line holds the SHA-256 of all that follows it. What follows holds the size and
  SHA-256 of the other files, name, dtype, shape and place of each array, and what the run wants to remember.

So a byte that is lost or changed anywhere is noticed. The directory is written under another name, brought to the
disk (fsync), and renamed: there is a whole checkpoint of that name, or none.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpitrain.errors import UsageError
from mpitrain.runtime.counted import counted

FORMAT = "mpitrain checkpoint 1"
MANIFEST, ARRAYS, MODEL = "manifest.json", "arrays.bin", "model.keras"
PART_PREFIX = ".part-"
ALIGNMENT_BYTES = 64
BLOCK_BYTES = 4 << 20
DIRECTORY_MODE, FILE_MODE = 0o750, 0o640  # weights are data: nothing for everyone
DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in (
        *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
        *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    )
}
Array = NDArray[Any]
ModelWriter = Callable[[Path], None]


class DamagedError(UsageError):
    """A checkpoint is not whole: a file is missing, cut off or changed."""


@dataclass(frozen=True)
class Snapshot:
    """What is saved."""

    arrays: Mapping[str, Array]  # by name
    info: Mapping[str, Any] = field(default_factory=dict)  # whatever JSON can hold


def write(path: Path, snapshot: Snapshot, write_model: ModelWriter | None = None) -> None:
    """Local: a new checkpoint at `path`, whole or not at all.

    `write_model` writes the file it is given, for other programs, if it can.

    Raises:
        OSError: it cannot be written, or `path` exists; nothing is left of it.
        TypeError: an array is of a type that has no numbers.
    """
    part = path.with_name(f"{PART_PREFIX}{path.name}-{socket.gethostname()}-{os.getpid()}")
    part.mkdir(mode=DIRECTORY_MODE)
    try:
        with _created(part / ARRAYS) as file:
            places, files = _write_arrays(file, snapshot.arrays)
        if write_model is not None:
            write_model(part / MODEL)
        if (part / MODEL).exists():
            (part / MODEL).chmod(FILE_MODE)
            files[MODEL] = _synchronized(part / MODEL)
        body = {"files": files, "arrays": places, "info": snapshot.info}
        with _created(part / MANIFEST) as file:
            file.write(_manifest(body))
        synchronize_directory(part)
        part.rename(path)  # fails if there is one of that name
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    # The new name is on the disk only with the directory that it stands in.
    synchronize_directory(path.parent)


def read_info(path: Path) -> dict[str, Any]:
    """Local: what the run wanted to remember; the arrays are not looked at.

    Raises:
        DamagedError: the manifest is not whole.
    """
    info: dict[str, Any] = _read_manifest(path)["info"]
    return info


def read(path: Path) -> Snapshot:
    """Local: a checkpoint, after every byte of it was checked.

    Raises:
        DamagedError: something of it is missing, cut off or changed.
    """
    manifest = _read_manifest(path)
    try:
        data = np.empty(0, np.uint8)
        for name, facts in manifest["files"].items():
            content = _checked(path, name, int(facts["bytes"]), str(facts["sha256"]), keep=name == ARRAYS)
            data = content if name == ARRAYS else data
        arrays = {str(place["name"]): _array(data, place) for place in manifest["arrays"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path / MANIFEST} is no manifest of a checkpoint ({error!r})") from error
    return Snapshot(arrays, manifest["info"])


def synchronize_directory(path: Path) -> None:
    """Local: bring the names in a directory to the disk, where its file system knows how to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file, on the disk when the context ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        yield file
        os.fsync(descriptor)


def _write_all(file: BinaryIO, data: memoryview) -> None:
    """A raw write may take less than it was given (a full disk says so only at the next one)."""
    while data:
        data = data[file.write(data[:BLOCK_BYTES]) :]


def _write_arrays(file: BinaryIO, arrays: Mapping[str, Array]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    places, digest, offset = [], hashlib.sha256(), 0
    for name, given in arrays.items():
        array = np.asarray(given, order="C")
        if DTYPES.get(array.dtype.name) != array.dtype:
            raise TypeError(f"{name} is of type {array.dtype}, which a checkpoint cannot hold")
        data = array.reshape(-1).view(np.uint8).data
        padding = memoryview(bytes(-offset % ALIGNMENT_BYTES))
        for piece in (padding, data):
            _write_all(file, piece)
            digest.update(piece)
        offset += len(padding)
        places.append(
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "offset": offset, "bytes": len(data)}
        )
        offset += len(data)
    return places, {ARRAYS: {"bytes": offset, "sha256": digest.hexdigest()}}


def _synchronized(path: Path) -> dict[str, Any]:
    """Size and checksum of a file that somebody else wrote, after it was brought to the disk."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        digest = hashlib.sha256()
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _manifest(body: Mapping[str, Any]) -> memoryview:
    """JSON, of which the first line holds the checksum of the rest."""
    rest = json.dumps(body, indent=1).encode()[2:]  # without "{\n"
    return memoryview(_first_line(rest) + rest)


def _first_line(rest: bytes) -> bytes:
    return f'{{"format": "{FORMAT}", "sha256": "{hashlib.sha256(rest).hexdigest()}",\n'.encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise DamagedError(f"{path / MANIFEST} cannot be read ({error.strerror})") from error
    first, _, rest = content.partition(b"\n")
    if first + b"\n" != _first_line(rest):
        known = first.startswith(f'{{"format": "{FORMAT}"'.encode())
        raise DamagedError(
            f"{path / MANIFEST} is " + ("cut off or changed" if known else f"not of the format {FORMAT!r}")
        )
    try:
        manifest: dict[str, Any] = json.loads(content)
        if not isinstance(manifest["info"], dict):
            raise TypeError("info")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path / MANIFEST} is no manifest of a checkpoint ({error!r})") from error
    return manifest


def _checked(path: Path, name: str, size: int, sha256: str, keep: bool) -> Array:
    """The content of a file if it is to be kept, else nothing."""
    if Path(name).name != name:
        raise DamagedError(f"{path / MANIFEST} names a file elsewhere, {name!r}")
    file_path, digest, done = path / name, hashlib.sha256(), 0
    try:
        with file_path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != size:
                raise DamagedError(
                    f"{file_path} has {counted(os.fstat(file.fileno()).st_size, 'byte')} instead of {size}"
                )
            content = np.empty(size if keep else min(size, BLOCK_BYTES), np.uint8)
            view = content.data
            while done < size:
                begin = done if keep else 0
                count = file.readinto(view[begin : begin + min(BLOCK_BYTES, size - done)])
                if not count:
                    raise DamagedError(f"{file_path} ends after {done} of {size} bytes")
                digest.update(view[begin : begin + count])
                done += count
    except OSError as error:
        raise DamagedError(f"{file_path} cannot be read ({error.strerror})") from error
    if digest.hexdigest() != sha256:
        raise DamagedError(f"{file_path} was changed: its checksum is not that of the manifest")
    return content


def _array(data: Array, place: Mapping[str, Any]) -> Array:
    dtype, shape = DTYPES[place["dtype"]], tuple(int(length) for length in place["shape"])
    offset, size = int(place["offset"]), int(place["bytes"])
    fits = all(length >= 0 for length in shape) and size == math.prod(shape) * dtype.itemsize
    if not fits or offset % ALIGNMENT_BYTES or not 0 <= offset <= len(data) - size:
        raise ValueError(f"array {place['name']!r} is not where it should be")
    return data[offset : offset + size].view(dtype).reshape(shape)
