"""`mpitrain train`, or just `mpitrain`: trains a model on all ranks that were started."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mpitrain import __version__
from mpitrain.checkpoint.output import prepare_directory
from mpitrain.cli.parser import Parser
from mpitrain.config import read_file, values
from mpitrain.errors import AgreedError, UsageError
from mpitrain.observe.ranks import Place, places, table
from mpitrain.runtime.counted import counted
from mpitrain.strategies.parameter_server.choice import device_of
from mpitrain.strategies.parameter_server.connection import client_of, connect, is_served
from mpitrain.trainer.options import DEFAULT_JOB, TrainConfig, known, merge
from mpitrain.world.consensus import check_equal, run_on_all, run_on_root
from mpitrain.world.start import init
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.data.source import Preprocessing
    from mpitrain.trainer.job import TrainingJob
    from mpitrain.trainer.trainer import Summary

EPILOG = (
    "Under mpirun -np N the job has N ranks. Every option can stand in FILE.toml. Measure with: mpitrain bench --help."
)


def add_parser(subparsers: Any) -> None:
    """Local: add `train` and its options to the command line."""
    parser: Parser = subparsers.add_parser("train", prog="mpitrain", description=__doc__, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"mpitrain {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="options; the command line wins")
    parser.add_options(
        known(), {name: f"{value} for the digits with cnn and adam" for name, value in DEFAULT_JOB.items()}
    )


def run(arguments: argparse.Namespace) -> int:
    """Collective: train, and print what came of it on rank 0.

    Raises:
        AgreedError: on every rank, for what the user can mend.
    """
    began = time.perf_counter()
    config, error = _configure(arguments)
    servers = config.exchange.servers
    device = device_of(servers, config.machine.device)
    world = init(**{**config.machine.arguments(), **config.faults, "device": device})
    _agree(world, config, error)
    shown = sys.stdout
    with contextlib.ExitStack() as stack:
        _quiet(config.machine.verbose, stack)
        found = places(world) if config.exchange.show_plan else []
        workers = world if servers is None else connect(world, servers)
        if workers is None:
            return 0  # a parameter server, whose workers are done
        # Keras, and functions of the user, print on every rank.
        if not workers.is_root:
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
        try:
            _train(workers, config, found, began, shown)
        except AgreedError as error:
            error.speaks = workers.is_root
            raise
    return 0


def _train(world: World, config: TrainConfig, found: list[Place], began: float, shown: TextIO) -> None:
    """Collective: what those ranks do that compute."""
    # Before TensorFlow is loaded, which takes seconds.
    run_on_root(world.communicator, lambda: prepare_directory(Path(config.output)))
    from mpitrain.trainer.job import prepare

    if world.is_root and found:
        print(table(found), flush=True)
    job = prepare(config, world)
    if world.is_root:
        print(_heading(world), *_plan(world, config, job), sep="\n", flush=True)
    summary = job.trainer.fit(job.source, config.output)
    if world.is_root:  # perhaps another rank than before
        print(*_results(summary, time.perf_counter() - began), sep="\n", file=shown, flush=True)


def _configure(arguments: argparse.Namespace) -> tuple[TrainConfig, UsageError | None]:
    """The options; or the defaults, and what is wrong on this rank."""
    given = {name: value for name, value in vars(arguments).items() if name in known()}
    try:
        file = None if arguments.config is None else read_file(arguments.config)
        return merge(given, file, str(arguments.config)), None
    except UsageError as error:
        # Told once all have met: ranks that have read another file may have nothing to complain of, and would wait.
        return TrainConfig(), error


def _agree(world: World, config: TrainConfig, error: UsageError | None) -> None:
    """Collective: leave if the options are wrong on some rank, or differ."""

    def check() -> None:
        if error is not None:
            raise error

    run_on_all(world.communicator, world.hosts, check)
    chosen = values(config)
    check_equal(
        world.communicator, world.hosts, {f"option {one.flag}": chosen.get(name) for name, one in known().items()}
    )


def _quiet(verbose: bool, stack: contextlib.ExitStack) -> None:
    """Local: no messages of TensorFlow unless wanted; warnings as they were at the end of `stack`."""
    stack.enter_context(warnings.catch_warnings())
    # Keras reads it when it is loaded, and may have another in ~/.keras/keras.json.
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if verbose:
        return
    for name in ("absl", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _heading(world: World) -> str:
    ranks, hosts = world.size, world.topology.node_count
    threads = world.threads
    return (
        f"mpitrain {__version__}: {counted(ranks, 'rank')} on {counted(hosts, 'host')}, "
        f"{world.devices.description}, {threads.intra} intra-op and {threads.inter} inter-op threads a rank"
    )


def _plan(world: World, config: TrainConfig, job: TrainingJob) -> list[str]:
    source, model = job.source, job.model
    rate = float(job.optimizer.learning_rate.numpy())
    classes = "regression" if source.num_classes is None else counted(source.num_classes, "class")
    changes = f"scaling with ranks: {config.lr_scaling}, decay: {config.lr_decay}"
    servers = []
    if is_served(world):
        from mpitrain.strategies.parameter_server.setup import described

        servers = described(job.model, job.optimizer, client_of(world), config.exchange.show_plan)
    counts = (
        f"{source.train_count:,} training, {source.validation_count:,} validation, "
        f"{counted(source.test_count, 'test sample')}"
    )
    return [
        f"data       {source.description}: {counts}, {classes}",
        f"inputs     {source.meaning.inputs}; {_preprocessing(source.meaning.preprocessing, config.model)}",
        f"labels     {source.meaning.labels}",
        f"model      {config.model}: {model.count_params():,} parameters, {_precision(config)}",
        f"batch      {config.batch_size} a rank, {config.batch_size * world.size} in all",
        f"optimizer  {_optimizer(config, job)}, learning rate {rate:g} ({changes})",
        *servers,
    ]


def _precision(config: TrainConfig) -> str:
    saved = config.model.endswith(".keras")
    return "as it was saved; what it was compiled with is not used" if saved else config.precision


def _optimizer(config: TrainConfig, job: TrainingJob) -> str:
    compiled = f"{type(job.optimizer).__name__} (the model is compiled with its loss, metrics and optimizer)"
    return compiled if job.trainer.keeps_compiled else config.optimizer


def _preprocessing(wanted: Preprocessing, model: str) -> str:
    """What becomes of samples in the model."""
    from mpitrain.trainer.models import is_own

    if is_own(model):
        left = f", so it has to divide them by {wanted.scale:g} itself" if wanted.scale != 1 else ""
        return f"your model takes them as they are{left}"
    resizes = [f"brings them to {wanted.size[0]}x{wanted.size[1]}"] if wanted.size is not None else []
    steps = [*resizes, *([f"divides them by {wanted.scale:g}"] if wanted.scale != 1 else [])]
    return f"the saved model itself {' and '.join(steps)}" if steps else "taken as they are"


def _results(summary: Summary, seconds: float) -> list[str]:
    times = summary.times
    accuracy_first = sorted(summary.results.items(), key=lambda item: item[0] == "loss")
    results = ", ".join(f"{name} {value:.4f}" for name, value in accuracy_first)
    parts = (
        f"compute {times.compute:.1f}, exchange {times.exchange:.1f}, waiting for the slowest rank {times.waiting:.1f}"
    )
    return [
        f"result     {results} on the {summary.evaluated_on} samples",
        f"time       {seconds:.1f} s, of which training {times.total:.1f} s: {parts} (means over ranks)",
        f"speed      {summary.samples_per_second:,.0f} samples/s of all ranks",
        *([f"servers    {summary.servers.text()}"] if summary.servers is not None else []),
        *(f"lost       {loss}" for loss in summary.losses),
        f"saved      {summary.model_path}",
    ]
