"""All options of the training job: their defaults, where they may come from, and what they may be.

Each option is written once, as a field of `TrainConfig`; the command line, the TOML file and the
checks follow from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIMIZERS = (
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lion",
    "nadam",
    "rmsprop",
    "sgd",
)
# For the default data, model and optimizer: as good with 1 rank as with 8, in about a minute.
DEFAULT_JOB: dict[str, Any] = {"epochs": 14, "batch_size": 8, "learning_rate": 0.005, "lr_decay": "cosine"}
MOST, MOST_THREADS = 10**9, 10**4  # more is a slip of the pen, and beyond what the libraries count with
KINDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Rule:
    """What one option may be.

    Attributes:
        help: its line on the command line.
        kind: int, float, str or bool.
        choices: the values it may have; () for any.
        least: smallest value.
        below: first value that is too large.
        positive: zero is too small.
        pattern: what a text must match, and how to say so.
        metavar: placeholder on the command line.
    """

    help: str
    kind: type
    choices: tuple[str, ...] = ()
    least: float | None = None
    below: float | None = None
    positive: bool = False
    pattern: tuple[str, str] | None = None
    metavar: str | None = None


def _option(default: Any, kind: type, text: str, **rules: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(text, kind, **rules)})


@dataclass(frozen=True)
class TrainConfig:
    """The options of `mpitrain train`; `tests/unit/test_config.py` holds their meaning."""

    data: str = _option(
        "digits", str, "digits, a .npz or .csv file, a folder of class folders, TFRecord files, or module:function"
    )
    model: str = _option("cnn", str, "cnn, mlp, a name from keras.applications, a .keras file, or module:function")
    epochs: int = _option(10, int, "passes over the training data", least=1, below=MOST, metavar="N")
    batch_size: int = _option(32, int, "samples a step, per rank", least=1, below=MOST, metavar="N")
    optimizer: str = _option("adam", str, "name of a Keras optimizer", choices=OPTIMIZERS)
    learning_rate: float | None = _option(
        None,
        float,
        "before scaling; else the optimizer's own",
        positive=True,
    )
    lr_scaling: str = _option(
        "none", str, "multiply the learning rate by the ranks, or their root", choices=("none", "linear", "sqrt")
    )
    lr_decay: str = _option(
        "none", str, "lower the learning rate to nearly 0 over the epochs", choices=("none", "cosine")
    )
    strategy: str = _option(
        "all-reduce",
        str,
        "all ranks average gradients, or parameter servers take them",
        choices=("all-reduce", "ps"),
    )
    ps: str = _option(
        "1",
        str,
        "so many of the first ranks are parameter servers; colocated: rank 0, which works too",
        pattern=(r"colocated|[1-9]\d*", "as a number of servers, or colocated"),
        metavar="N",
    )
    mode: str = _option(
        "sync", str, "servers wait for all workers, or apply each gradient when it comes", choices=("sync", "async")
    )
    ps_sharding: str = _option(
        "bytes", str, "variables go to servers balanced by bytes, or in turn", choices=("bytes", "round-robin")
    )
    ps_max_shard_bytes: int = _option(
        16 << 20, int, "larger variables are split between servers, along their first axis", least=1, metavar="N"
    )
    backup_workers: int = _option(
        0, int, "sync: so many gradients of each step are not waited for", least=0, metavar="N"
    )
    max_staleness: int | None = _option(
        None, int, "async: by how many steps a worker may be ahead of the slowest", least=0, metavar="N"
    )
    stale: str = _option("keep", str, "async: gradients of older parameters", choices=("keep", "drop", "scale"))
    warmup_steps: int = _option(0, int, "async: steps that the first worker trains alone", least=0, metavar="N")
    ps_compression: str = _option("none", str, "how gradients and parameters travel", choices=("none", "float16"))
    precision: str = _option(
        "float32", str, "of the computation", choices=("float32", "mixed_bfloat16", "mixed_float16")
    )
    seed: int = _option(0, int, "of weights, shuffling and held-out samples", least=0, below=2**32, metavar="N")
    validation_split: float = _option(0.1, float, "fraction of the training samples held out", least=0, below=1)
    output: str = _option("mpitrain-output", str, "directory for model and summary", metavar="DIR")
    checkpoint_dir: str | None = _option(
        None, str, "save the run there while it goes on, and go on from there", metavar="DIR"
    )
    checkpoint_every: str = _option(
        "epoch",
        str,
        "write a checkpoint so often: epoch, or as in 500steps, 10min",
        pattern=(r"epoch|[1-9]\d* ?(steps?|s|min|h)", "epoch, or as in 500steps or 10min"),
        metavar="WHEN",
    )
    checkpoint_keep: int = _option(
        3, int, "newest checkpoints to keep, beside the best", least=1, below=MOST, metavar="N"
    )
    checkpoint_best: str | None = _option(
        None, str, "metric of the best checkpoint; else val_loss, or loss without validation", metavar="NAME"
    )
    resume: str = _option(
        "auto", str, "auto: from the newest checkpoint there is; never; or the path of one", metavar="WHICH"
    )
    grace: float = _option(
        30.0, float, "seconds from SIGTERM, SIGUSR1 or Ctrl-C to the end, with a checkpoint", positive=True, below=86400
    )
    task: str = _option(
        "auto",
        str,
        "what the labels are; auto: whole numbers are classes",
        choices=("auto", "classification", "regression"),
    )
    classes: int | None = _option(
        None, int, "how many there are; else seen from the labels", least=2, below=MOST, metavar="N"
    )
    feature_spec: str | None = _option(None, str, "TFRecord features, as JSON; else seen from the first record")
    image_size: str | None = _option(
        None, str, "bring images to this size", pattern=(r"[1-9]\d{0,4}x[1-9]\d{0,4}", "as in 224x224"), metavar="HxW"
    )
    device: str = _option("auto", str, "what each rank computes on", choices=("auto", "cpu", "gpu"))
    gpu_memory: str | None = _option(None, str, "growth, a fraction, or MiB, for each rank")
    share_gpus: bool = _option(False, bool, "let several ranks use one GPU")
    visible_devices: str | None = _option(None, str, "GPUs of each host that ranks may use, as in 0,2", metavar="LIST")
    intra_threads: int | None = _option(
        None, int, "threads within an operation, per rank", least=1, below=MOST_THREADS, metavar="N"
    )
    inter_threads: int | None = _option(
        None, int, "operations at the same time, per rank", least=1, below=MOST_THREADS, metavar="N"
    )
    stall_warning: float | None = _option(
        None,
        float,
        "tell who has not come when a rank has waited so long; 0 never (default 30)",
        least=0,
        metavar="SECONDS",
    )
    stall_abort: float | None = _option(
        None, float, "then end the job, with exit code 75; 0 never (default 300)", least=0, metavar="SECONDS"
    )
    non_finite: str = _option(
        "stop", str, "at a loss or mean gradient that is not finite", choices=("stop", "warn", "ignore")
    )
    on_failure: str | None = _option(
        None, str, "when a rank dies: abort (the default), or shrink: go on without it", choices=("abort", "shrink")
    )
    min_np: int | None = _option(
        None, int, "with how many ranks to go on at least (default 1)", least=1, below=MOST, metavar="N"
    )
    verify_replicas: int = _option(
        1, int, "compare the replicas after each N-th epoch; 0 never", least=0, below=MOST, metavar="N"
    )
    show_plan: bool = _option(False, bool, "print where each rank is, and what it has")
    verbose: bool = _option(False, bool, "keep the messages of TensorFlow")

    def __post_init__(self) -> None:
        for name, rule in rules().items():
            value = getattr(self, name)
            if value is not None:
                _check(_flag(name), rule, value)

    @property
    def image_shape(self) -> tuple[int, int] | None:
        """`image_size` as (height, width)."""
        if self.image_size is None:
            return None
        height, width = self.image_size.split("x")
        return int(height), int(width)


def rules() -> dict[str, Rule]:
    """The rule of each option, by its name."""
    return {item.name: item.metadata["rule"] for item in dataclasses.fields(TrainConfig)}


def merge(command_line: Mapping[str, Any], file: Mapping[str, Any] | None = None, source: str = "") -> TrainConfig:
    """Local: options from the command line before those of a file before the defaults.

    Args:
        command_line: what was given there; texts are converted.
        file: from `read_file`.
        source: name of the file, for messages.

    Raises:
        UsageError: an option does not exist or has a value it may not have.
    """
    values: dict[str, Any] = {}
    for name, value in (file or {}).items():
        values[_known(name, source)] = _convert(f"{name} in {source}", rules()[_known(name, source)], value)
    for name, value in command_line.items():
        values[name] = _convert(_flag(name), rules()[name], value)
    config = TrainConfig(**values)
    default_job = (config.data, config.model, config.optimizer) == ("digits", "cnn", "adam")
    return TrainConfig(**{**DEFAULT_JOB, **values}) if default_job else config


def read_file(path: Path) -> dict[str, Any]:
    """Local: the options in a TOML file.

    Raises:
        UsageError: the file is missing or is not TOML.
    """
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read ({error.strerror}): correct the path") from error
    except (ValueError, RecursionError) as error:  # of TOML, or of UTF-8; or brackets in thousands of brackets
        raise UsageError(f"the configuration {path} is not TOML ({error}): write lines such as epochs = 5") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _known(name: str, source: str) -> str:
    option = name.replace("-", "_")
    if option not in rules():
        close = difflib.get_close_matches(option, rules(), 1)
        hint = f"did you mean {close[0]}?" if close else "mpitrain --help names all options"
        raise UsageError(f"there is no option {name!r} in {source}: {hint}")
    return option


def _convert(name: str, rule: Rule, value: Any) -> Any:
    """`value` as the option's kind; whole numbers do for numbers, texts for anything but flags."""
    if rule.kind is bool or rule.kind is str:
        fits = isinstance(value, rule.kind)
    else:
        fits = isinstance(value, int | float | str) and not isinstance(value, bool)
    if rule.kind is int and isinstance(value, float):
        fits = False
    try:
        if fits:
            return rule.kind(value)
    except ValueError:
        pass
    raise UsageError(f"{name} is {value!r}: give {KINDS[rule.kind]}")


def _check(name: str, rule: Rule, value: Any) -> None:
    if rule.choices and value not in rule.choices:
        raise UsageError(f"{name} is {value!r}: choose one of {', '.join(rule.choices)}")
    if rule.pattern and not re.fullmatch(rule.pattern[0], value):
        raise UsageError(f"{name} is {value!r}: write it {rule.pattern[1]}")
    if rule.kind is str and not value.strip():
        raise UsageError(f"{name} is empty: leave it out, or give a value")
    if rule.kind is str and "\0" in value:
        raise UsageError(f"{name} is {value!r}: leave the NUL character out, which no file name may have")
    if rule.kind in (int, float):
        _check_range(name, rule, value)


def _check_range(name: str, rule: Rule, value: float) -> None:
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value}: give a finite number")
    if rule.positive and value <= 0:
        raise UsageError(f"{name} is {value}: it must be above 0")
    if rule.least is not None and value < rule.least:
        raise UsageError(f"{name} is {value}: it must be at least {rule.least:g}")
    if rule.below is not None and value >= rule.below:
        raise UsageError(f"{name} is {value}: it must be below {rule.below:g}")
