"""Options of the training job: where they come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.config import read_file, values
from mpitrain.errors import UsageError
from mpitrain.trainer.options import DEFAULT_JOB, OPTIMIZERS, TrainConfig, known, merge


def test_defaults_pass_their_own_rules() -> None:
    assert merge({}) == TrainConfig(**DEFAULT_JOB)


def test_texts_of_the_command_line_are_converted() -> None:
    config = merge({"epochs": "3", "learning_rate": "1e-2", "data": "x.npz", "share_gpus": True})
    assert (config.epochs, config.learning_rate, config.data, config.machine.share_gpus) == (3, 0.01, "x.npz", True)


def test_command_line_wins_over_file_wins_over_default() -> None:
    config = merge({"epochs": "3"}, {"epochs": 5, "batch-size": 7}, "job.toml")
    assert (config.epochs, config.batch_size, config.seed) == (3, 7, TrainConfig().seed)


def test_every_option_can_stand_in_a_file(tmp_path: Path) -> None:
    given: dict[str, str] = {}
    for name, one in known().items():
        if one.kind is str:
            text = one.choices[-1] if one.choices else {"checkpoint_every": "5steps", "ps": "2"}.get(name, "64x32")
            text = "classification" if name == "task" else text
            given[name] = f'"{text}"'
        else:
            given[name] = {int: "4", float: "0.5", bool: "true"}[one.kind]
    del (
        given["backup_workers"],
        given["sync_batch_norm"],
        given["jit"],
    )  # which are for another mode or strategy than others
    path = tmp_path / "job.toml"
    path.write_text("".join(f"{name.replace('_', '-')} = {value}\n" for name, value in given.items()))
    config = merge({}, read_file(path), str(path))
    found, defaults = values(config), values(TrainConfig())
    unset = [name for name in known() if found[name] == defaults.get(name)]
    assert sorted(unset) == ["backup_workers", "jit", "sync_batch_norm"]
    assert config.given == set(given)
    assert config.image_shape == (64, 32)


def test_settings_of_the_default_job_only() -> None:
    def settings(config: TrainConfig) -> tuple[object, ...]:
        return config.epochs, config.batch_size, config.learning_rate, config.lr_decay

    assert settings(merge({})) == (14, 8, 0.005, "cosine")
    assert settings(merge({"epochs": "3"}, {"batch-size": 5}, "job.toml")) == (3, 5, 0.005, "cosine")
    for other in ({"data": "x.npz"}, {"model": "mlp"}, {"optimizer": "sgd"}):
        assert settings(merge(other)) == (10, 32, None, "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": "0"}, "--epochs is 0: it must be at least 1"),
        ({"epochs": "many"}, "--epochs is 'many': give a whole number"),
        ({"epochs": "1.5"}, "--epochs is '1.5': give a whole number"),
        ({"batch_size": "0"}, "--batch-size is 0: it must be at least 1"),
        ({"batch_size": "-4"}, "--batch-size is -4: it must be at least 1"),
        ({"learning_rate": "0"}, "--learning-rate is 0.0: it must be above 0"),
        ({"learning_rate": "nan"}, "--learning-rate is nan: give a finite number"),
        ({"learning_rate": "inf"}, "--learning-rate is inf: give a finite number"),
        ({"lr_scaling": "cubic"}, "--lr-scaling is 'cubic': choose one of none, linear, sqrt"),
        ({"precision": "float8"}, "--precision is 'float8': choose one of float32, mixed_bfloat16, mixed_float16"),
        ({"optimizer": "best"}, f"--optimizer is 'best': choose one of {', '.join(OPTIMIZERS)}"),
        ({"validation_split": "1"}, "--validation-split is 1.0: it must be below 1"),
        ({"validation_split": "-0.1"}, "--validation-split is -0.1: it must be at least 0"),
        ({"seed": "-1"}, "--seed is -1: it must be at least 0"),
        ({"image_size": "big"}, "--image-size is 'big': write it as in 224x224"),
        ({"image_size": "0x10"}, "--image-size is '0x10': write it as in 224x224"),
        ({"checkpoint_every": "often"}, "--checkpoint-every is 'often': write it epoch, or as in 500steps or 10min"),
        ({"checkpoint_keep": "0"}, "--checkpoint-keep is 0: it must be at least 1"),
        ({"grace": "0"}, "--grace is 0.0: it must be above 0"),
        ({"output": ""}, "--output is empty: leave it out, or give a value"),
        ({"classes": "1"}, "--classes is 1: it must be at least 2"),
        ({"verify_replicas": "-1"}, "--verify-replicas is -1: it must be at least 0"),
    ],
)
def test_wrong_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        merge(options)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", "there is no option 'epoch' in {path}: did you mean epochs?"),
        ("zzz = 3", "there is no option 'zzz' in {path}: mpitrain --help names all options"),
        ("epochs = true", "epochs in {path} is True: give a whole number"),
        ("epochs = 2.0", "epochs in {path} is 2.0: give a whole number"),
        ("data = 3", "data in {path} is 3: give a text"),
        ("share-gpus = 'yes'", "share-gpus in {path} is 'yes': give true or false"),
        ("[train]\nepochs = 3", "there is no option 'train' in {path}: mpitrain --help names all options"),
        ("epochs = [1]", "epochs in {path} is [1]: give a whole number"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        merge({}, read_file(path), str(path))
    assert str(raised.value) == message.format(path=path)


def test_file_that_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("epochs 3")
    with pytest.raises(UsageError, match=r"is not TOML .*write lines such as epochs = 5"):
        read_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        read_file(path)


def test_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read \(No such file or directory\): correct the path"):
        read_file(tmp_path / "none.toml")


def test_all_named_optimizers_exist() -> None:
    keras = pytest.importorskip("keras")
    for name in OPTIMIZERS:
        assert type(keras.optimizers.get(name)).__name__.lower() == name
