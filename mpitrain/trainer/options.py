"""All options of the training job: its own, and those of the rooms that it uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.config import MOST, Option, build, check_needs, from_file, given_of, option, options, read, room
from mpitrain.errors import UsageError
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.options import MachineOptions
from mpitrain.strategies.options import StrategyOptions

OPTIMIZERS = ("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lion", "nadam", "rmsprop", "sgd")
# For the default data, model and optimizer: as good with 1 rank as with 8, in about a minute.
DEFAULT_JOB: dict[str, Any] = {"epochs": 14, "batch_size": 8, "learning_rate": 0.005, "lr_decay": "cosine"}


@dataclass(frozen=True)
class TrainConfig:
    """The options of `mpitrain train`: its own, and those of the rooms that it uses."""

    data: str = option(
        "digits", "digits, a .npz, .csv or .tsv file, a folder of class folders, TFRecord files, or module:function"
    )
    model: str = option("cnn", "cnn, mlp, a name from keras.applications, a .keras file, or module:function")
    epochs: int = option(10, "passes over the training data", least=1, below=MOST)
    batch_size: int = option(32, "samples a step, per rank", least=1, below=MOST)
    optimizer: str = option("adam", "name of a Keras optimizer", choices=OPTIMIZERS)
    learning_rate: float | None = option(None, "learning rate before scaling; else the optimizer's own", positive=True)
    lr_scaling: str = option(
        "none", "multiply the learning rate by the ranks, or their root", choices=("none", "linear", "sqrt")
    )
    lr_decay: str = option("none", "lower the learning rate to nearly 0 over the epochs", choices=("none", "cosine"))
    exchange: StrategyOptions = room(StrategyOptions)
    precision: str = option("float32", "of the computation", choices=("float32", "mixed_bfloat16", "mixed_float16"))
    jit: str = option(
        "keras",
        "compile training steps with XLA: as Keras decides, or always, never, or if that is found to be faster",
        choices=("keras", "on", "off", "auto"),
        needs=(("strategy", ("all-reduce",)),),
    )
    seed: int = option(0, "seed of weights, shuffling and held-out samples", least=0, below=2**32)
    validation_split: float = option(0.1, "fraction of the training samples held out", least=0, below=1)
    output: str = option("mpitrain-output", "directory for model and summary", metavar="DIR", incidental=True)
    checkpoint_dir: str | None = option(
        None, "save the run there while it goes on, and go on from there", metavar="DIR", incidental=True
    )
    checkpoints: CheckpointOptions = room(CheckpointOptions, needs=(("checkpoint_dir", ()),), incidental=True)
    task: str = option(
        "auto", "what the labels are; auto: whole numbers are classes", choices=("auto", "classification", "regression")
    )
    classes: int | None = option(
        None, "how many classes there are; else seen from the labels", least=2, below=MOST, metavar="N"
    )
    feature_spec: str | None = option(None, "TFRecord features, as JSON; else seen from the first record")
    image_size: str | None = option(
        None, "bring images to this size", pattern=(r"[1-9]\d{0,4}x[1-9]\d{0,4}", "as in 224x224"), metavar="HxW"
    )
    verify_replicas: int = option(
        1, "compare the replicas after each N-th epoch; 0 never", least=0, below=MOST, incidental=True
    )
    machine: MachineOptions = room(MachineOptions, incidental=True)
    faults: Mapping[str, Any] = given_of(FaultOptions, {"non_finite": "stop"}, incidental=True)
    given: frozenset[str] = field(default=frozenset(), compare=False)  # of the others, on the command line or in a file

    def __post_init__(self) -> None:
        check_needs(self, self.given)
        if self.classes is not None and self.task == "regression":
            raise UsageError("--classes is for classes, but --task is regression: leave out one of them")

    @property
    def image_shape(self) -> tuple[int, int] | None:
        """`image_size` as (height, width)."""
        if self.image_size is None:
            return None
        height, width = self.image_size.split("x")
        return int(height), int(width)


def known() -> dict[str, Option]:
    """Local: the options of the training job, by their names."""
    return options(TrainConfig, "train")


def merge(command_line: Mapping[str, Any], file: Mapping[str, Any] | None = None, source: str = "") -> TrainConfig:
    """Local: options from the command line before those of a file before the defaults.

    Raises:
        UsageError: an option does not exist or has a value it may not have.
    """
    found = from_file(file or {}, source, known())
    found |= {name: read(known()[name].flag, known()[name], value) for name, value in command_line.items()}
    config = dataclasses.replace(build(TrainConfig, found), given=frozenset(found))
    default_job = (config.data, config.model, config.optimizer) == ("digits", "cnn", "adam")
    settings = {name: value for name, value in DEFAULT_JOB.items() if default_job and name not in found}
    return dataclasses.replace(config, **settings)
