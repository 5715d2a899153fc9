"""From options to what is trained: data, model and optimizer of the training job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from mpitrain.comm.together import same, together
from mpitrain.comm.world import World
from mpitrain.config import TrainConfig
from mpitrain.data.load import load
from mpitrain.data.source import DataSource
from mpitrain.training import models
from mpitrain.training.checkpoint.options import Options
from mpitrain.training.objective import check_fits
from mpitrain.training.trainer import Trainer, cosine_decay, enough_to_evaluate, make_optimizer


@dataclass(frozen=True)
class Job:
    """What one training run works on, and the trainer that does it."""

    source: DataSource
    model: Any
    optimizer: Any
    trainer: Trainer


def prepare(config: TrainConfig, world: World) -> Job:
    """Collective: load this rank's data and build the model.

    Raises:
        AgreedError: on every rank, when data or model cannot be used on some rank.
    """
    place = (world.communicator, world.hosts)
    keras.config.set_dtype_policy(config.precision)
    source = together(*place, lambda: _load(config, world))
    counts = (source.train_count, source.validation_count, source.test_count)
    same(
        *place,
        {
            f"the number of samples in {config.data}": counts,
            f"the shape of a sample in {config.data}": source.input_shape,
            f"the classes in {config.data}": source.meaning.class_names or source.num_classes,
            f"the values in {config.data}": source.meaning.preprocessing,
        },
    )
    model = together(*place, lambda: _build(config, source))
    optimizer = make_optimizer(config.optimizer, config.learning_rate, config.lr_scaling, world.size)
    rate = float(optimizer.learning_rate.numpy())
    trainer = Trainer(
        model,
        optimizer=optimizer,
        batch_size=config.batch_size,
        epochs=config.epochs,
        callbacks=[cosine_decay(rate, config.epochs)] if config.lr_decay == "cosine" else [],
        checkpoints=_checkpoints(config),
        verify_replicas=config.verify_replicas,
        world=world,
    )
    return Job(source, model, optimizer, trainer)


def _checkpoints(config: TrainConfig) -> Options | None:
    if config.checkpoint_dir is None:
        return None
    return Options(
        Path(config.checkpoint_dir).expanduser().absolute(),
        config.checkpoint_every,
        config.checkpoint_keep,
        config.checkpoint_best,
        config.resume,
        config.grace,
    )


def _load(config: TrainConfig, world: World) -> DataSource:
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
    return model
