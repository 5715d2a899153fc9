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
from mpitrain.config import DEFAULT_JOB, TrainConfig, merge, read_file, rules
from mpitrain.errors import AgreedError, UsageError
from mpitrain.observe.ranks import Place, places, table
from mpitrain.rules import Rule
from mpitrain.strategies.parameter_server.choice import device_of, options_of
from mpitrain.strategies.parameter_server.connection import connect, is_served
from mpitrain.world.consensus import root_only, same, together
from mpitrain.world.start import init
from mpitrain.world.world import World

if TYPE_CHECKING:
    from mpitrain.data.source import Preprocessing
    from mpitrain.trainer.job import Job
    from mpitrain.trainer.trainer import Summary

EPILOG = (
    "Under mpirun -np N the job has N ranks. Every option can stand in FILE.toml. Measure with: mpitrain bench --help"
)


def add_parser(subparsers: Any) -> None:
    """Local: add `train` and its options to the command line."""
    parser = subparsers.add_parser("train", prog="mpitrain", description=__doc__, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"mpitrain {__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="options; the command line wins")
    defaults = TrainConfig()
    for name, rule in rules().items():
        flag = "--" + name.replace("_", "-")
        if rule.kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=rule.help)
        else:
            # Texts: `config` converts them, as it does those of a file.
            parser.add_argument(
                flag,
                default=argparse.SUPPRESS,
                metavar=_metavar(rule),
                help=_help(rule, getattr(defaults, name), DEFAULT_JOB.get(name)),
            )


def run(arguments: argparse.Namespace) -> int:
    """Collective: train, and print what came of it on rank 0.

    Raises:
        AgreedError: on every rank, for what the user can mend.
    """
    began = time.perf_counter()
    config, error = _configure(arguments)
    world = init(
        device=device_of(config, config.device),
        gpu_memory=config.gpu_memory,
        share_gpus=config.share_gpus,
        visible_devices=config.visible_devices,
        threads=_threads(config),
        verbose=config.verbose,
        stall_warning=config.stall_warning,
        stall_abort=config.stall_abort,
        non_finite=config.non_finite,
        on_failure=config.on_failure,
        min_np=config.min_np,
    )
    _agree(world, config, error)
    shown = sys.stdout
    with contextlib.ExitStack() as stack:
        _quiet(config.verbose, stack)
        found = places(world) if config.show_plan else []
        options = options_of(config)
        workers = world if options is None else connect(world, options)
        if workers is None:
            return 0  # a parameter server, whose workers are done
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
    root_only(world.communicator, lambda: prepare_directory(Path(config.output)))
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
    given = {name: value for name, value in vars(arguments).items() if name in rules()}
    try:
        file = None if arguments.config is None else read_file(arguments.config)
        return merge(given, file, str(arguments.config)), None
    except UsageError as error:
        return TrainConfig(), error


def _agree(world: World, config: TrainConfig, error: UsageError | None) -> None:
    """Collective: leave if the options are wrong on some rank, or differ."""

    def check() -> None:
        if error is not None:
            raise error

    together(world.communicator, world.hosts, check)
    same(
        world.communicator,
        world.hosts,
        {f"option --{name.replace('_', '-')}": getattr(config, name) for name in rules()},
    )


def _quiet(verbose: bool, stack: contextlib.ExitStack) -> None:
    """Local: no messages of TensorFlow unless wanted; warnings as they were at the end of `stack`."""
    stack.enter_context(warnings.catch_warnings())
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if verbose:
        return
    for name in ("absl", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _threads(config: TrainConfig) -> tuple[int | None, int | None] | None:
    threads = (config.intra_threads, config.inter_threads)
    return None if threads == (None, None) else threads


def _heading(world: World) -> str:
    ranks, hosts = world.size, world.topology.node_count
    threads = world.threads
    return (
        f"mpitrain {__version__}: {ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}, "
        f"{world.devices.description}, {threads.intra} intra-op and {threads.inter} inter-op threads a rank"
    )


def _plan(world: World, config: TrainConfig, job: Job) -> list[str]:
    source, model = job.source, job.model
    rate = float(job.optimizer.learning_rate.numpy())
    classes = "regression" if source.num_classes is None else f"{source.num_classes} classes"
    changes = f"scaling with ranks: {config.lr_scaling}, decay: {config.lr_decay}"
    servers = []
    if is_served(world):
        from mpitrain.strategies.parameter_server.setup import described

        servers = described(job.model, job.optimizer, world, config.show_plan)
    counts = f"{source.train_count:,} training, {source.validation_count:,} validation, {source.test_count:,}"
    return [
        f"data       {source.description}: {counts} test samples, {classes}",
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


def _optimizer(config: TrainConfig, job: Job) -> str:
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
    results = ", ".join(f"{name} {value:.4f}" for name, value in _accuracy_first(summary.results).items())
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


def _accuracy_first(results: dict[str, float]) -> dict[str, float]:
    return dict(sorted(results.items(), key=lambda item: item[0] == "loss"))


def _metavar(rule: Rule) -> str | None:
    if rule.choices:
        return "{" + ",".join(rule.choices) + "}" if len(rule.choices) < 5 else "NAME"
    return rule.metavar or {int: "N", float: "X"}.get(rule.kind)


def _help(rule: Rule, default: Any, in_default_job: Any) -> str:
    text = rule.help if len(rule.choices) < 5 else f"{rule.help}: {', '.join(rule.choices)}"
    defaults = [] if default is None else [f"default {default}"]
    if in_default_job is not None:
        defaults.append(f"{in_default_job} for the digits with cnn and adam")
    return f"{text} ({'; '.join(defaults)})" if defaults else text
