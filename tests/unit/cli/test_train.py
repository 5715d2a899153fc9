"""What the job without a script tells, and how its options come together."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpitrain.cli import train
from mpitrain.data.source import Preprocessing
from mpitrain.errors import AgreedError
from mpitrain.strategies.parameter_server.counts import ServerCounts
from mpitrain.trainer.options import TrainConfig
from mpitrain.trainer.trainer import Summary
from mpitrain.world.world import World
from tests.unit.job import run


def summary(**changes: Any) -> Summary:
    times = SimpleNamespace(total=20.0, compute=12.5, exchange=2.5, waiting=5.0)
    given = {
        "history": {},
        "evaluated_on": "test",
        "results": {"loss": 0.25, "accuracy": 0.975},
        "samples": 30_000,
        "times": times,
        "model_path": Path("out/model.keras"),
        **changes,
    }
    return Summary(**given)


def test_what_came_of_it() -> None:
    times = "compute 12.5, exchange 2.5, waiting for the slowest rank 5.0 (means over ranks)"
    assert train._results(summary(), 32.5) == [
        "result     accuracy 0.9750, loss 0.2500 on the test samples",
        f"time       32.5 s, of which training 20.0 s: {times}",
        "speed      1,500 samples/s of all ranks",
        "saved      out/model.keras",
    ]
    more = train._results(summary(servers=ServerCounts(3, 0, {}), losses=("rank 1",)), 32.5)
    assert more[3:5] == ["servers    3 updates", "lost       rank 1"]


def test_the_heading_tells_of_ranks_and_hosts() -> None:
    (heading, _) = run(2, train._heading, ["node1", "node2"])
    assert ": 2 ranks on 2 hosts, " in heading
    assert heading.endswith("1 intra-op and 8 inter-op threads a rank")


@pytest.mark.parametrize(
    ("wanted", "model", "expected"),
    [
        (Preprocessing(), "cnn", "taken as they are"),
        (Preprocessing(255.0), "cnn", "the saved model itself divides them by 255"),
        (
            Preprocessing(255.0, (64, 32)),
            "ResNet50",
            "the saved model itself brings them to 64x32 and divides them by 255",
        ),
        (Preprocessing(), "a.b:c", "your model takes them as they are"),
        (Preprocessing(16.0), "a.b:c", "your model takes them as they are, so it has to divide them by 16 itself"),
    ],
)
def test_what_becomes_of_samples(wanted: Preprocessing, model: str, expected: str) -> None:
    assert train._preprocessing(wanted, model) == expected


def test_a_saved_model_has_its_own_precision_and_a_compiled_one_its_optimizer() -> None:
    assert train._precision(TrainConfig()) == "float32"
    assert train._precision(TrainConfig(model="a.keras")).startswith("as it was saved")
    adam = type("Adam", (), {})()
    job = SimpleNamespace(optimizer=adam, trainer=SimpleNamespace(keeps_compiled=True))
    assert train._optimizer(TrainConfig(optimizer="sgd"), cast(Any, job)).startswith("Adam (the model is compiled")
    job.trainer.keeps_compiled = False
    assert train._optimizer(TrainConfig(optimizer="sgd"), cast(Any, job)) == "sgd"


def test_options_of_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('batch-size = 3\nmodel = "mlp"\n')
    config, error = train._configure(argparse.Namespace(config=file, batch_size=5, unrelated=1))
    assert (config.batch_size, config.model, error) == (5, "mlp", None)
    file.write_text("batch-sise = 3\n")
    config, error = train._configure(argparse.Namespace(config=file))
    assert config == TrainConfig()  # told once all have met
    assert "batch-sise" in str(error)


def test_what_is_wrong_on_one_rank_ends_all() -> None:
    def rank(world: World) -> str:
        config, error = TrainConfig(), None
        if world.rank:
            config = TrainConfig(batch_size=7)
        with pytest.raises(AgreedError) as caught:
            train._agree(world, config, error)
        return str(caught.value)

    found = run(2, rank)
    assert found[0] == found[1]
    assert "option --batch-size" in found[0]
