"""From options to what is trained: data, model and optimizer of the training job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.config import values
from mpitrain.data.labels import some
from mpitrain.data.load import load
from mpitrain.data.source import DataSource
from mpitrain.errors import UsageError
from mpitrain.trainer import models
from mpitrain.trainer.data import check_same
from mpitrain.trainer.objective import check_fits
from mpitrain.trainer.options import TrainConfig, known
from mpitrain.trainer.trainer import Trainer, cosine_decay, enough_to_evaluate, make_optimizer, scaled_learning_rate
from mpitrain.world.consensus import run_on_all
from mpitrain.world.world import World


@dataclass(frozen=True)
class TrainingJob:
    """What one training run works on, and the trainer that does it."""

    source: DataSource
    model: Any
    optimizer: Any
    trainer: Trainer


def prepare(config: TrainConfig, world: World) -> TrainingJob:
    """Collective: load this rank's data and build the model.

    Raises:
        AgreedError: on every rank, when data or model cannot be used on some rank.
    """
    place = (world.communicator, world.hosts)
    # Before the model is built: a layer takes the policy that is set when it is made.
    keras.config.set_dtype_policy(config.precision)
    source = run_on_all(*place, lambda: load_data(config, world))
    check_same(source, config.data, world)
    model = run_on_all(*place, lambda: _build(config, source))
    optimizer = run_on_all(*place, lambda: _optimizer(config, model, world.size))
    rate = float(optimizer.learning_rate.numpy())
    trainer = Trainer(
        model,
        optimizer=None if model.compiled else optimizer,
        batch_size=config.batch_size,
        epochs=config.epochs,
        callbacks=[cosine_decay(rate, config.epochs)] if config.lr_decay == "cosine" else [],
        checkpoints=_checkpoints(config, source),
        verify_replicas=config.verify_replicas,
        sync_batch_norm=config.exchange.sync_batch_norm,
        jit=config.jit,  # type: ignore[arg-type]
        world=world,
    )
    return TrainingJob(source, model, optimizer, trainer)


def _optimizer(config: TrainConfig, model: Any, ranks: int) -> Any:
    """Local: as the options say, or that which the user's function has compiled the model with."""
    if not model.compiled:
        return make_optimizer(config.optimizer, config.learning_rate, config.lr_scaling, ranks)
    twice = next((name for name in ("optimizer", "learning_rate") if name in config.given), None)
    if twice is not None:
        raise UsageError(
            f"{config.model} compiles its model with an optimizer of its own, so --{twice.replace('_', '-')} does "
            "nothing: leave it out, or the compile in the function"
        )
    optimizer = model.optimizer
    if config.lr_scaling != "none" or config.lr_decay != "none":
        try:
            rate = float(optimizer.learning_rate.numpy())
            optimizer.learning_rate = scaled_learning_rate(rate, config.lr_scaling, ranks)
        except TypeError as error:
            raise UsageError(
                f"{config.model} compiles its model with a schedule for the learning rate, which --lr-scaling and "
                "--lr-decay cannot change: leave them out"
            ) from error
    return optimizer


def _checkpoints(config: TrainConfig, source: DataSource) -> CheckpointOptions | None:
    if config.checkpoint_dir is None:
        return None
    directory = Path(config.checkpoint_dir).expanduser().absolute()
    return dataclasses.replace(config.checkpoints, directory=directory, run=_run(config, source))


def _run(config: TrainConfig, source: DataSource) -> dict[str, Any]:
    """Local: what the numbers of this run follow from, as JSON can hold it."""
    chosen = values(config)
    named = {one.flag: chosen[name] for name, one in known().items() if not one.incidental}
    names = source.as_info()["class_names"]
    return {
        **named,
        "training samples": source.train_count,
        "the shape of a sample": list(source.input_shape),
        "classes": None if names is None else some(names),
    }


def load_data(config: TrainConfig, world: World) -> DataSource:
    """Local: this rank's share of the data.

    Raises:
        UsageError: they cannot be used, or not with these options or so many ranks.
    """
    source = load(
        config.data,
        validation_split=config.validation_split,
        seed=config.seed,
        rank=world.rank,
        size=world.size,
        task=config.task,  # type: ignore[arg-type]
        num_classes=config.classes,
        feature_spec=config.feature_spec,
        image_size=config.image_shape,
    )
    if source.own_validation and "validation_split" in config.given:
        raise UsageError(
            f"--validation-split does nothing for {config.data}, which has validation samples: leave it out"
        )
    enough_to_evaluate(source, world.size)
    return source


def _build(config: TrainConfig, source: DataSource) -> Any:
    outputs = int((source.label_shape or (1,))[0] or 1)
    model = models.build(
        config.model,
        input_shape=source.input_shape,
        num_classes=source.num_classes,
        seed=config.seed,
        outputs=outputs,
        preprocessing=source.meaning.preprocessing,
    )
    check_fits(model, source)
    if config.model.endswith(".keras") and "precision" in config.given:
        raise UsageError(f"--precision does nothing for {config.model}, whose layers have theirs: leave it out")
    return model
