"""The data of a training: each rank gets its share, and all know that they have parts of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitrain.data.labels import Task
from mpitrain.data.load import Data, load
from mpitrain.data.source import DataSource
from mpitrain.world.consensus import check_equal, run_on_all
from mpitrain.world.start import current_world
from mpitrain.world.world import World


def load_data(
    data: Data,
    *,
    validation_split: float = 0.1,
    seed: int = 0,
    task: Task = "auto",
    num_classes: int | None = None,
    feature_spec: str | None = None,
    image_size: tuple[int, int] | None = None,
    world: World | None = None,
) -> DataSource:
    """Collective: data for a `Trainer`, of which each rank gets its share.

    Args:
        data: the same on all ranks: what `--data` takes (`digits`, a file, a folder, `module:function`); a pair of
            arrays (x, y); arrays by the names of a `.npz` file (`x_train`, `y_train`, `x_test`, ...); or a
            `tf.data.Dataset` of single (x, y), in the same order each time.
        validation_split: the fraction of training samples to hold out, unless the data bring validation samples.
        seed: decides what is held out, and the order of each epoch.
        task: `classification`, `regression`, or `auto`: whole numbers are classes.
        num_classes: how many classes there are; else one more than the largest label.
        feature_spec: features of TFRecords, as JSON; else seen from the first record.
        image_size: (height, width) to bring encoded images to; else that of the first one.
        world: the job; the current one by default.

    Raises:
        AgreedError: on every rank: the data cannot be used on some rank, or are others there.

    Example:
        >>> data = mpitrain.load_data((np.eye(8), np.arange(8) % 2), validation_split=0.25)
        >>> data.train_count, data.validation_count, data.num_classes
        (6, 2, 2)
    """
    group = world or current_world()

    def read() -> DataSource:
        return load(
            data,
            validation_split=validation_split,
            seed=seed,
            rank=group.rank,
            size=group.size,
            task=task,
            num_classes=num_classes,
            feature_spec=feature_spec,
            image_size=image_size,
        )

    source = run_on_all(group.communicator, group.hosts, read)
    check_same(source, str(data) if isinstance(data, str | Path) else "the data", group)
    return source


def check_same(source: DataSource, name: str, world: World) -> None:
    """Collective: whether all ranks have shares of the same data.

    Raises:
        AgreedError: they have not.
    """
    found: dict[str, Any] = {
        f"the number of samples in {name}": (source.train_count, source.validation_count, source.test_count),
        f"the shape of a sample in {name}": source.input_shape,
        f"the classes in {name}": source.meaning.class_names or source.num_classes,
        f"the values in {name}": source.meaning.preprocessing,
    }
    check_equal(world.communicator, world.hosts, found)
