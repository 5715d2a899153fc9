"""Every option acts in every situation, or is refused in a sentence: option by option.

An option that is in none of these tables makes a test fail: give it a row.
"""

from __future__ import annotations

import argparse
import inspect
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.cli import script
from mpitrain.cli.parser import Parser
from mpitrain.config import build, options, own_options, read_file
from mpitrain.data.load import OPTIONS, load
from mpitrain.errors import DataError, UsageError
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.options import MachineOptions
from mpitrain.scripts.options import ScriptOptions
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.trainer import job
from mpitrain.trainer.options import TrainConfig, known, merge

# Of the job without a script. These act whatever else is given; the tests of what they do are elsewhere.
ALWAYS = {
    *("data", "model", "epochs", "batch_size", "optimizer", "learning_rate", "lr_scaling", "lr_decay", "strategy"),
    *("precision", "seed", "output", "checkpoint_dir", "device", "intra_threads", "inter_threads"),
    *("stall_warning", "stall_abort", "non_finite", "on_failure", "verify_replicas", "show_plan", "verbose"),
}
# A value; what it needs; and command lines with which it does nothing.
PS, ASYNC, DIR = "--strategy ps", "--strategy ps --mode async", "--checkpoint-dir x"
NEEDING = {
    "ps": ("1", PS, [""]),
    "mode": ("async", PS, [""]),
    "ps_sharding": ("bytes", PS, [""]),
    "ps_max_shard_bytes": ("9", PS, [""]),
    "ps_compression": ("none", PS, [""]),
    "backup_workers": ("0", PS, ["", ASYNC]),
    "max_staleness": ("3", ASYNC, ["", PS]),
    "stale": ("keep", ASYNC, ["", PS]),
    "warmup_steps": ("0", ASYNC, ["", PS]),
    "checkpoint_every": ("epoch", DIR, [""]),
    "checkpoint_keep": ("3", DIR, [""]),
    "checkpoint_best": ("loss", DIR, [""]),
    "resume": ("auto", DIR, [""]),
    "grace": ("30", DIR, [""]),
    "sync_batch_norm": (True, "", [PS]),
    "jit": ("auto", "", [PS]),
    "gpu_memory": ("growth", "", ["--device cpu"]),
    "share_gpus": (True, "", ["--device cpu"]),
    "visible_devices": ("0", "--device gpu", ["--device cpu"]),
}
# For which data they act; see `test_data_options`.
OF_DATA: dict[str, tuple[Any, set[str]]] = {
    "task": ("classification", {"function", "npz", "table", "records", "arrays", "dataset"}),
    "classes": (3, {"function", "npz", "table", "records", "arrays", "dataset"}),
    "feature_spec": ('{"y": {"kind": "int"}}', {"records"}),
    "image_size": ((8, 9), {"folders", "records"}),
}
ELSEWHERE = {"min_np", "validation_split"}  # `test_min_np`, `test_data_with_validation_samples`
# Of scripts, beside those that `NEEDING` has.
OF_SCRIPTS = {
    *("help", "non_finite", "show_plan", "as_horovod", "strategy", "device", "intra_threads", "inter_threads"),
    *("stall_warning", "stall_abort", "verbose"),
}
NOT_FOR_HOROVOD = {
    "batch_size_is": "global",
    "output": "x",
    "dry_run": True,
    "divide_loops": True,
    "loss_is": "sum",
    "sync_batch_norm": True,
}


def given(words: str) -> dict[str, str]:
    """A command line as `merge` takes it."""
    parts = shlex.split(words)
    return {name[2:].replace("-", "_"): value for name, value in zip(parts[::2], parts[1::2], strict=True)}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_every_option_has_a_row() -> None:
    tables = [ALWAYS, set(NEEDING), set(OF_DATA), ELSEWHERE]
    assert sorted(known()) == sorted(name for table in tables for name in table)


@pytest.mark.parametrize("name", NEEDING)
def test_options_that_need_others(name: str, tmp_path: Path) -> None:
    value, needed, without = NEEDING[name]
    assert name in merge({**given(needed), name: value}).given
    for words in without:
        with pytest.raises(
            UsageError, match=f"^{flag(name)} does nothing without --.*: give that, too, or leave it out"
        ):
            merge({**given(words), name: value})
        merge(given(words))  # its default is no wish
    text = value if not isinstance(value, str) or known()[name].kind is not str else f'"{value}"'
    lines = [f"{flag(name)[2:]} = {str(text).lower()}", *(f'{k} = "{v}"' for k, v in given(without[-1]).items())]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    with pytest.raises(UsageError, match="does nothing without"):
        merge({}, read_file(tmp_path / "job.toml"), "job.toml")


def test_two_spellings_in_one_file() -> None:
    with pytest.raises(UsageError, match="batch_size stands twice in"):
        merge({}, {"batch-size": 3, "batch_size": 4}, "job.toml")


def test_classes_of_quantities() -> None:
    with pytest.raises(UsageError, match="--classes is for classes, but --task is regression"):
        merge({"classes": "3", "task": "regression"})


def test_min_np() -> None:
    assert FaultOptions.of({}, min_np=2, on_failure="shrink").min_np == 2
    assert FaultOptions.of({"MPITRAIN_ON_FAILURE": "shrink"}, min_np=2).min_np == 2
    for on_failure in (None, "abort"):
        with pytest.raises(UsageError, match="--min-np does nothing without --on-failure shrink"):
            FaultOptions.of({}, min_np=2, on_failure=on_failure)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One of each kind, of two classes."""
    path = tmp_path_factory.mktemp("data")
    np.savez(path / "a.npz", x=np.eye(6), y=np.arange(6) % 2)
    (path / "a.csv").write_text("a,label\n1,0\n2,1\n")
    picture = tf.io.encode_png(np.zeros((4, 5, 3), np.uint8)).numpy()
    for name in ("a", "b"):
        (path / "folders" / name).mkdir(parents=True)
        (path / "folders" / name / "1.png").write_bytes(picture)
    with tf.io.TFRecordWriter(str(path / "a.tfrecord")) as writer:
        for label in range(2):
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[picture]))
            number = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
            example = tf.train.Example(features=tf.train.Features(feature={"image": image, "label": number}))
            writer.write(example.SerializeToString())
    return {
        "digits": "digits",
        "function": f"{__name__}:points",
        "npz": str(path / "a.npz"),
        "table": str(path / "a.csv"),
        "folders": str(path / "folders"),
        "records": str(path / "a.tfrecord"),
        "arrays": (np.eye(6), np.arange(6) % 2),
        "dataset": points(),
    }


def test_data_with_validation_samples(tmp_path: Path) -> None:
    x, y = np.eye(6), np.arange(6) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y, x_val=x, y_val=y)
    alone: Any = SimpleNamespace(rank=0, size=1)
    given_data = {"data": str(tmp_path / "a.npz")}
    source = job.load_data(merge(given_data), alone)
    assert (source.train_count, source.validation_count) == (6, 6)
    with pytest.raises(UsageError, match=r"--validation-split does nothing for .*a\.npz, which has validation samples"):
        job.load_data(merge({**given_data, "validation_split": "0.1"}), alone)


def points() -> Any:
    return tf.data.Dataset.from_tensor_slices((np.eye(6, dtype=np.float32), np.arange(6) % 2))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", OF_DATA)
def test_data_options(data: dict[str, Any], name: str, kind: str) -> None:
    value, kinds = OF_DATA[name]
    told: dict[str, Any] = {"num_classes" if name == "classes" else name: value}

    def read() -> Any:
        return load(data[kind], validation_split=0.0, seed=0, rank=0, size=1, **told)

    if kind not in kinds:
        with pytest.raises(DataError, match=rf"^{flag(name)} does nothing for .*: leave it out"):
            read()
        return
    source = read()
    if name == "classes":
        assert source.num_classes == 3
    if name == "image_size":
        assert source.input_shape == (8, 9, 3)


def parameters(function: Any) -> dict[str, Any]:
    """The defaults of the arguments of a function."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def test_arguments_of_init_are_those_of_the_tables() -> None:
    given = parameters(mpitrain.init)
    machine = {name: one.default for name, one in own_options(MachineOptions).items() if not name.endswith("_threads")}
    assert given == machine | {"threads": None} | dict.fromkeys(options(FaultOptions, "init"))


@pytest.mark.parametrize(
    ("public", "table", "others"),
    [
        (mpitrain.ParameterServer, ServerOptions, {"world"}),
        (mpitrain.callbacks.Checkpoint, CheckpointOptions, {"directory", "run", "callbacks", "world", "dealt"}),
    ],
)
def test_arguments_of_classes_are_those_of_their_tables(public: Any, table: type, others: set[str]) -> None:
    given = parameters(public)
    assert given.keys() == own_options(table).keys() | others
    defaults = {
        name: None if one.default is None else one.kind(given[name]) for name, one in own_options(table).items()
    }
    assert defaults == {name: one.default for name, one in own_options(table).items()}


def test_arguments_of_parameter_servers_reach_them() -> None:
    words = {str: "x", int: 7}
    given: dict[str, Any] = {name: words[one.kind] for name, one in own_options(ServerOptions).items()}
    assert mpitrain.ParameterServer(**given).options == ServerOptions(**given)


def script_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mpitrain")
    subparsers = parser.add_subparsers(parser_class=Parser)
    script.add_parser(subparsers)
    own: argparse.ArgumentParser = subparsers.choices["script"]
    return own


def script_options() -> set[str]:
    return {action.dest for action in script_parser()._actions}


def test_every_option_of_scripts_has_a_row() -> None:
    names = script_options()
    assert names == OF_SCRIPTS | set(NOT_FOR_HOROVOD) | {name for name in NEEDING if name in names}


@pytest.mark.parametrize("name", sorted(script_options() & {*NEEDING, *NOT_FOR_HOROVOD}))
def test_options_of_scripts_that_need_others(name: str) -> None:
    def check(words: str) -> None:
        given = vars(script_parser().parse_args(shlex.split(words)))
        build(ScriptOptions, given).check(frozenset(given))

    value = NOT_FOR_HOROVOD.get(name, NEEDING.get(name, ("",))[0])
    option = flag(name) if value is True else f"{flag(name)} {value}"
    _, needed, without = NEEDING.get(name, ("", "", ["--as-horovod"]))
    check(f"{needed} {option}")
    for words in without:
        check(words)
        with pytest.raises(UsageError, match=f"^{flag(name)} does nothing with"):
            check(f"{words} {option}")


def test_defaults_of_scripts_are_those_of_the_job() -> None:
    arguments = vars(script_parser().parse_args([]))
    assert arguments == {}
    chosen, job_options = build(ScriptOptions, arguments), TrainConfig()
    assert (chosen.exchange, chosen.machine) == (job_options.exchange, job_options.machine)
    assert (chosen.batch_size_is, chosen.output) == ("rank", job_options.output)
    assert (chosen.faults, job_options.faults) == ({}, {"non_finite": "stop"})
