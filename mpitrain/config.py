"""All options of the training job: their defaults, where they may come from, and what they may be.

Each option is written once, as a field of `TrainConfig`; the command line, the TOML file and the
checks follow from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.rules import ALL_REDUCE, ASYNCHRONOUS, CHECKPOINTS, GPUS, SERVERS, Rule, check, convert, flag, option

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


@dataclass(frozen=True)
class TrainConfig:
    """The options of `mpitrain train`; `tests/unit/test_config.py` holds their meaning."""

    data: str = option(
        "digits",
        str,
        "digits, a .npz, .csv or .tsv file, a folder of class folders, TFRecord files, or module:function",
    )
    model: str = option("cnn", str, "cnn, mlp, a name from keras.applications, a .keras file, or module:function")
    epochs: int = option(10, int, "passes over the training data", least=1, below=MOST, metavar="N")
    batch_size: int = option(32, int, "samples a step, per rank", least=1, below=MOST, metavar="N")
    optimizer: str = option("adam", str, "name of a Keras optimizer", choices=OPTIMIZERS)
    learning_rate: float | None = option(
        None,
        float,
        "before scaling; else the optimizer's own",
        positive=True,
    )
    lr_scaling: str = option(
        "none", str, "multiply the learning rate by the ranks, or their root", choices=("none", "linear", "sqrt")
    )
    lr_decay: str = option(
        "none", str, "lower the learning rate to nearly 0 over the epochs", choices=("none", "cosine")
    )
    strategy: str = option(
        "all-reduce",
        str,
        "all ranks average gradients, or parameter servers take them",
        choices=("all-reduce", "ps"),
    )
    ps: str = option(
        "1",
        str,
        "so many of the first ranks are parameter servers; colocated: rank 0, which works too",
        pattern=(r"colocated|[1-9]\d*", "as a number of servers, or colocated"),
        metavar="N",
        needs=SERVERS,
    )
    mode: str = option(
        "sync",
        str,
        "servers wait for all workers, or apply each gradient when it comes",
        choices=("sync", "async"),
        needs=SERVERS,
    )
    ps_sharding: str = option(
        "bytes",
        str,
        "variables go to servers balanced by bytes, or in turn",
        choices=("bytes", "round-robin"),
        needs=SERVERS,
    )
    ps_max_shard_bytes: int = option(
        16 << 20,
        int,
        "larger variables are split between servers, along their first axis",
        least=1,
        metavar="N",
        needs=SERVERS,
    )
    backup_workers: int = option(
        0,
        int,
        "sync: so many gradients of each step are not waited for",
        least=0,
        metavar="N",
        needs=(*SERVERS, ("mode", ("sync",))),
    )
    max_staleness: int | None = option(
        None,
        int,
        "async: by how many steps a worker may be ahead of the slowest",
        least=0,
        metavar="N",
        needs=ASYNCHRONOUS,
    )
    stale: str = option(
        "keep", str, "async: gradients of older parameters", choices=("keep", "drop", "scale"), needs=ASYNCHRONOUS
    )
    warmup_steps: int = option(
        0, int, "async: steps that the first worker trains alone", least=0, metavar="N", needs=ASYNCHRONOUS
    )
    ps_compression: str = option(
        "none", str, "how gradients and parameters travel", choices=("none", "float16"), needs=SERVERS
    )
    precision: str = option(
        "float32", str, "of the computation", choices=("float32", "mixed_bfloat16", "mixed_float16")
    )
    seed: int = option(0, int, "of weights, shuffling and held-out samples", least=0, below=2**32, metavar="N")
    validation_split: float = option(0.1, float, "fraction of the training samples held out", least=0, below=1)
    output: str = option("mpitrain-output", str, "directory for model and summary", metavar="DIR", incidental=True)
    checkpoint_dir: str | None = option(
        None, str, "save the run there while it goes on, and go on from there", metavar="DIR", incidental=True
    )
    checkpoint_every: str = option(
        "epoch",
        str,
        "write a checkpoint so often: epoch, or as in 500steps, 10min",
        pattern=(r"epoch|[1-9]\d* ?(steps?|s|min|h)", "epoch, or as in 500steps or 10min"),
        metavar="WHEN",
        needs=CHECKPOINTS,
        incidental=True,
    )
    checkpoint_keep: int = option(
        3,
        int,
        "newest checkpoints to keep, beside the best",
        least=1,
        below=MOST,
        metavar="N",
        needs=CHECKPOINTS,
        incidental=True,
    )
    checkpoint_best: str | None = option(
        None,
        str,
        "metric of the best checkpoint; else val_loss, or loss without validation",
        metavar="NAME",
        needs=CHECKPOINTS,
        incidental=True,
    )
    resume: str = option(
        "auto",
        str,
        "auto: from the newest checkpoint there is; never; or the path of one",
        metavar="WHICH",
        needs=CHECKPOINTS,
        incidental=True,
    )
    grace: float = option(
        30.0,
        float,
        "seconds from SIGTERM, SIGUSR1 or Ctrl-C to the end, with a checkpoint",
        positive=True,
        below=86400,
        needs=CHECKPOINTS,
        incidental=True,
    )
    task: str = option(
        "auto",
        str,
        "what the labels are; auto: whole numbers are classes",
        choices=("auto", "classification", "regression"),
    )
    classes: int | None = option(
        None, int, "how many there are; else seen from the labels", least=2, below=MOST, metavar="N"
    )
    feature_spec: str | None = option(None, str, "TFRecord features, as JSON; else seen from the first record")
    image_size: str | None = option(
        None, str, "bring images to this size", pattern=(r"[1-9]\d{0,4}x[1-9]\d{0,4}", "as in 224x224"), metavar="HxW"
    )
    device: str = option("auto", str, "what each rank computes on", choices=("auto", "cpu", "gpu"), incidental=True)
    gpu_memory: str | None = option(
        None, str, "of a GPU, for each rank: growth, a fraction, or MiB", needs=GPUS, incidental=True
    )
    share_gpus: bool = option(False, bool, "let several ranks use one GPU", needs=GPUS, incidental=True)
    visible_devices: str | None = option(
        None, str, "GPUs of each host that ranks may use, as in 0,2", metavar="LIST", needs=GPUS, incidental=True
    )
    intra_threads: int | None = option(
        None, int, "threads within an operation, per rank", least=1, below=MOST_THREADS, metavar="N", incidental=True
    )
    inter_threads: int | None = option(
        None, int, "operations at the same time, per rank", least=1, below=MOST_THREADS, metavar="N", incidental=True
    )
    stall_warning: float | None = option(
        None,
        float,
        "tell who has not come when a rank has waited so long; 0 never (default 30)",
        least=0,
        metavar="SECONDS",
        incidental=True,
    )
    stall_abort: float | None = option(
        None,
        float,
        "then end the job, with exit code 75; 0 never (default 300)",
        least=0,
        metavar="SECONDS",
        incidental=True,
    )
    non_finite: str = option(
        "stop",
        str,
        "at a loss or mean gradient that is not finite",
        choices=("stop", "warn", "ignore"),
        incidental=True,
    )
    on_failure: str | None = option(
        None,
        str,
        "when a rank dies: abort (the default), or shrink: go on without it",
        choices=("abort", "shrink"),
        incidental=True,
    )
    min_np: int | None = option(
        None,
        int,
        "with how many ranks to go on at least (default 1)",
        least=1,
        below=MOST,
        metavar="N",
        incidental=True,
    )
    sync_batch_norm: bool = option(
        False, bool, "batch normalization uses the moments of all ranks' samples", needs=ALL_REDUCE
    )
    verify_replicas: int = option(
        1, int, "compare the replicas after each N-th epoch; 0 never", least=0, below=MOST, metavar="N", incidental=True
    )
    show_plan: bool = option(False, bool, "print where each rank is, and what it has", incidental=True)
    verbose: bool = option(False, bool, "keep the messages of TensorFlow", incidental=True)
    given: frozenset[str] = field(default=frozenset(), compare=False)  # of the others, on the command line or in a file

    def __post_init__(self) -> None:
        for name, rule in rules().items():
            value = getattr(self, name)
            if value is not None:
                check(flag(name), rule, value)
        check_needs(self.given, lambda name: getattr(self, name))
        if self.classes is not None and self.task == "regression":
            raise UsageError("--classes is for classes, but --task is regression: leave out one of them")

    @property
    def image_shape(self) -> tuple[int, int] | None:
        """`image_size` as (height, width)."""
        if self.image_size is None:
            return None
        height, width = self.image_size.split("x")
        return int(height), int(width)


def rules() -> dict[str, Rule]:
    """The rule of each option, by its name."""
    return {item.name: item.metadata["rule"] for item in dataclasses.fields(TrainConfig) if "rule" in item.metadata}


def check_needs(given: Collection[str], value: Callable[[str], object]) -> None:
    """Local: whether every option that was given can act.

    Args:
        given: names of options.
        value: of an option, by its name.

    Raises:
        UsageError: one would do nothing, since another option is not as it needs it.
    """
    for name, rule in rules().items():
        for other, wanted in rule.needs if name in given else ():
            found = value(other)
            if found is None or (wanted and found not in wanted):
                needed = f"{flag(other)} {' or '.join(wanted)}".rstrip()
                raise UsageError(f"{flag(name)} does nothing without {needed}: give that, too, or leave it out")


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
        option = _known(name, source)
        if option in values:
            raise UsageError(f"{name} stands twice in {source}, in two spellings: leave one out")
        values[option] = convert(f"{name} in {source}", rules()[option], value)
    for name, value in command_line.items():
        values[name] = convert(flag(name), rules()[name], value)
    config = TrainConfig(**values, given=frozenset(values))
    default_job = (config.data, config.model, config.optimizer) == ("digits", "cnn", "adam")
    return dataclasses.replace(config, **{**DEFAULT_JOB, **values}) if default_job else config


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


def _known(name: str, source: str) -> str:
    option = name.replace("-", "_")
    if option not in rules():
        close = difflib.get_close_matches(option, rules(), 1)
        hint = f"did you mean {close[0]}?" if close else "mpitrain --help names all options"
        raise UsageError(f"there is no option {name!r} in {source}: {hint}")
    return option
