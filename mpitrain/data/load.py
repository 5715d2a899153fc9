"""From what the user names as data to a `DataSource`."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from mpitrain.data.arrays import load_npz
from mpitrain.data.digits import load_digits
from mpitrain.data.function import load_function
from mpitrain.data.images import load_images
from mpitrain.data.labels import Task
from mpitrain.data.source import DataSource, Share
from mpitrain.data.table import load_csv
from mpitrain.data.tfrecord import load_tfrecords
from mpitrain.errors import DataError

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
KINDS = "digits, a .npz or .csv file, a directory of class folders, TFRecord files, or package.module:function"


def load(
    spec: str,
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
    """Local: this rank's share of the data that `spec` names; all ranks pass the same but `rank`.

    Args:
        spec: digits, a `.npz` or `.csv` file, a directory of class folders, TFRecord files (a glob, a file
            or a directory of them), or `package.module:function`.
        validation_split: the fraction of training samples to hold out, at least 0 and below 1; of no effect
            on a directory that has its own validation folder.
        seed: decides what is held out, and the order of each epoch; the test samples of the digits are
            always the same.
        rank: of this process.
        size: number of ranks.
        task: classification, regression, or auto: whole numbers are classes.
        num_classes: how many classes there are; else one more than the largest label.
        feature_spec: for TFRecords, JSON as in `features.feature_spec`.
        image_size: for encoded images, (height, width) to bring them to; else that of the first one.

    Raises:
        DataError: one sentence that says what is wrong with the data and how to mend it.
    """
    share = Share(validation_split, seed, rank, size)
    if spec == "digits":
        return load_digits(share)
    path = Path(spec).expanduser()
    if path.is_dir():
        files = _record_files(path)
        if files:
            return load_tfrecords(files, share, task, num_classes, feature_spec, image_size)
        return load_images(path, share, image_size)
    if FUNCTION.fullmatch(spec) and not path.exists():
        return load_function(spec, share, task, num_classes)
    files = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 (it may be absolute)
    if path.exists():
        files = [path]
    if not files:
        raise DataError(f"data {spec!r} do not exist: give {KINDS}")
    if len(files) == 1 and files[0].suffix == ".npz":
        return load_npz(files[0], share, task, num_classes)
    if len(files) == 1 and files[0].suffix == ".csv":
        return load_csv(files[0], share, task, num_classes)
    odd = [file for file in files if not _is_record_file(file)]
    if odd:
        raise DataError(f"{odd[0]} is of no kind that can be read here: give {KINDS}")
    return load_tfrecords(files, share, task, num_classes, feature_spec, image_size)


def _is_record_file(path: Path) -> bool:
    return path.is_file() and ("tfrecord" in path.name.lower() or path.suffix.lower() in (".tfrec", ".records"))


def _record_files(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _is_record_file(path))
    except OSError as error:
        raise DataError(f"{directory} cannot be listed ({error.strerror}): check that you may read it") from error
