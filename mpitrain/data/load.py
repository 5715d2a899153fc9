"""From what the user names as data to a `DataSource`."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from mpitrain.data.arrays import load_arrays, load_npz
from mpitrain.data.digits import load_digits
from mpitrain.data.function import load_dataset, load_function
from mpitrain.data.image_folders import load_images
from mpitrain.data.labels import Task
from mpitrain.data.source import DataSource, Share
from mpitrain.data.table import load_csv
from mpitrain.data.tfrecord import load_tfrecords
from mpitrain.errors import DataError

Data: TypeAlias = "str | Path | tuple[Any, Any] | Mapping[str, Any] | tf.data.Dataset"
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
KINDS = (
    "digits, a .npz, .csv or .tsv file, a directory of class folders, TFRecord files (*.tfrecord, or "
    "name-00000-of-00004), or package.module:function"
)
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
SHARD = re.compile(r".+-\d{5}-of-\d{5}")  # as TensorFlow's tools name the parts of a data set

# What each kind of data is called, and which options there are for it.
OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "digits": ("the bundled digits", ()),
    "function": ("a function", ("task", "classes")),
    "npz": ("a .npz file", ("task", "classes")),
    "arrays": ("arrays", ("task", "classes")),
    "dataset": ("a tf.data.Dataset", ("task", "classes")),
    "table": ("a table", ("task", "classes")),
    "folders": ("folders of images", ("image_size",)),
    "records": ("TFRecord files", ("task", "classes", "feature_spec", "image_size")),
}


def load(
    data: Data,
    *,
    validation_split: float,
    seed: int,
    rank: int,
    size: int,
    task: Task = "auto",
    num_classes: int | None = None,
    feature_spec: str | None = None,
    image_size: tuple[int, int] | None = None,
) -> DataSource:
    """Local: this rank's share of some data; all ranks pass the same but `rank`.

    Data and options are those of `trainer.data.load_data`.

    Raises:
        DataError: one sentence that says what is wrong with the data and how to mend it.
    """
    share = Share(validation_split, seed, rank, size)
    if isinstance(data, tuple) and len(data) == 2:
        data = dict(zip("xy", data, strict=True))
    kind, files = _kind(data)
    word, known = OPTIONS[kind]
    spec = str(data) if isinstance(data, str | Path) else word
    given = {"task": task != "auto", "classes": num_classes, "feature_spec": feature_spec, "image_size": image_size}
    named = "" if spec == word else f" ({spec})"
    for name, value in given.items():
        if value and name not in known:
            raise DataError(f"--{name.replace('_', '-')} does nothing for {word}{named}: leave it out")
    if kind == "digits":
        return load_digits(share)
    if kind == "function":
        return load_function(spec, share, task, num_classes)
    if kind == "dataset":
        return load_dataset(data, spec, share, task, num_classes)
    if kind == "arrays":
        arrays = {name: np.asarray(one) for name, one in data.items()}  # type: ignore[union-attr]
        return load_arrays(arrays, spec, share, task, num_classes)
    if kind == "folders":
        return load_images(files[0], share, image_size)
    if kind == "npz":
        return load_npz(files[0], share, task, num_classes)
    if kind == "table":
        return load_csv(files[0], share, task, num_classes)
    return load_tfrecords(files, share, task, num_classes, feature_spec, image_size)


def _kind(data: Data) -> tuple[str, list[Path]]:
    """Of which kind the data are, and where they lie."""
    if isinstance(data, tf.data.Dataset):
        return "dataset", []
    if isinstance(data, Mapping):
        return "arrays", []
    if not isinstance(data, str | Path):
        raise DataError(f"data are a {type(data).__name__}: give arrays (x, y), a tf.data.Dataset, or {KINDS}")
    spec = str(data)
    path = Path(spec).expanduser()
    if spec == "digits" or (FUNCTION.fullmatch(spec) and not path.exists()):
        return "digits" if spec == "digits" else "function", []
    if ADDRESS.match(spec):
        raise DataError(f"data {spec} are not on this host: download them, and give the path of the file or directory")
    if path.is_dir():
        files = _record_files(path)
        return ("records", files) if files else ("folders", [path])
    files = [path] if path.exists() else _named(path)
    if not files:
        raise DataError(f"data {spec!r} do not exist: give {KINDS}")
    pipe = next((file for file in files if not file.is_file()), None)
    if pipe is not None:  # or a device: nothing may ever come from there
        raise DataError(f"{pipe} is no file that each rank can read for itself: save the data in one")
    kinds = {_kind_of(file) for file in files}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is not None and (len(files) == 1 or kind == "records"):
        return kind, files
    if kind is not None:
        raise DataError(f"{spec} names {len(files)} files: only TFRecords may be several, so join them in one")
    odd = next(file for file in files if _kind_of(file) != "records")
    raise DataError(f"{odd} is of no kind that can be read here: give {KINDS}")


def _kind_of(file: Path) -> str | None:
    name = file.name.lower()
    if name.endswith(".npz"):
        return "npz"
    if name.removesuffix(".gz").endswith((".csv", ".tsv")):
        return "table"
    return "records" if _is_record_file(file) else None


def _named(pattern: Path) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))  # noqa: PTH207 (it may be absolute)


def _is_record_file(path: Path) -> bool:
    name = path.name.lower()
    named = "tfrecord" in name or path.suffix.lower() in (".tfrec", ".records") or SHARD.fullmatch(name) is not None
    return named and not name.startswith(".") and path.is_file()


def _record_files(directory: Path) -> list[Path]:
    """The TFRecord files of a directory."""
    try:
        files = sorted(path for path in directory.iterdir() if _is_record_file(path))
    except OSError as error:
        raise DataError(f"{directory} cannot be listed ({error.strerror}): check that you may read it") from error
    folders = list(dict.fromkeys(file.parent for file in sorted(directory.glob("*/*")) if _is_record_file(file)))
    if folders and not files:
        one = next((folder for folder in folders if "train" in folder.name.lower()), folders[0])
        raise DataError(f"{directory} holds TFRecord files in folders: give those to train on, such as {one}")
    return files
