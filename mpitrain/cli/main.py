"""The command `mpitrain`, on every rank: rank 0 speaks, and what one rank refuses, all leave with."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from mpitrain import __version__
from mpitrain.cli.parser import Parser
from mpitrain.errors import AgreedError, LauncherError, UsageError
from mpitrain.runtime import streams, string_hashes
from mpitrain.runtime.launcher import detect
from mpitrain.runtime.marks import note_exit, reporter

# Each is a module of this package, with `add_parser(subparsers)` and `run(arguments) -> exit code`; so is `script`,
# which is not named but seen by the script among the arguments. Some have `divide(arguments) -> (own, rest)`: what
# is not for them to read is `arguments.rest`. Nothing heavy is imported here: some commands need no TensorFlow, no
# MPI and no NumPy.
COMMANDS = {
    "train": "trains a model (the default)",
    "bench": "measures",
    "run": "starts ranks, here or on other hosts",
    "doctor": "looks for what would stop a job",
    "hosts": "converts lists of hosts",
    "serve": "makes the ranks a cluster of TensorFlow",
}
LIKENESS = 0.75  # of what was meant
SCRIPTS = "; a script, or -m and a module, runs on all ranks"
HEARD_SECONDS = 2.0  # in which the words of another rank reach the launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Collective: run the command that the arguments name, `train` by default.

    Returns:
        The exit code.

    Raises:
        UsageError: only this rank has it, so leaving would let the others wait: the job is to be ended.
    """
    if argv is None:
        streams.open_all()
        string_hashes.share_seed()
    try:
        code = _main(argv)
    except SystemExit as leaving:
        note_exit(leaving.code)
        raise
    note_exit(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    launcher = detect(os.environ)
    try:
        reporter()
        _look_around()
        command, arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        if not command.__name__.endswith(".script"):  # whose words are its own
            streams.take_all_letters()
        code: int = command.run(arguments)
        return code
    except AgreedError as error:
        first = launcher is None or launcher.rank in (None, 0)
        return _refuse(error, speak=first if error.speaks is None else error.speaks)
    except LauncherError as error:
        # There is no job to agree in. Each host speaks: what is wrong may be wrong on one of them only.
        first = launcher is None or launcher.local_rank in (None, 0)
        if not first:
            time.sleep(HEARD_SECONDS)
        return _refuse(error, speak=first)
    except UsageError as error:
        if launcher is not None and launcher.size != 1:
            raise
        return _refuse(error, speak=True)


def _look_around() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise LauncherError(f"the working directory is gone ({error.strerror}): change to one that exists") from error


def _parse(argv: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Collective where the arguments are wrong, so that no rank leaves before rank 0 has said so."""
    try:
        return parsed(argv)
    except UsageError as error:
        leave_with(error)


def parsed(argv: list[str], others: Collection[str] = ()) -> tuple[ModuleType, argparse.Namespace]:
    """Local: the command that the arguments name, and its options.

    `others` are options that may have been meant, though they are another command's.

    Raises:
        UsageError: they are wrong.
    """
    name, own, rest = _divide(argv)
    parser = Parser(prog="mpitrain")
    parser.add_argument("--version", action="version", version=f"mpitrain {__version__}")
    if own == ["--version"]:
        parser.parse_args(own)
    command = _module(name)
    subparsers = parser.add_subparsers(parser_class=Parser)
    command.add_parser(subparsers)
    chosen: Parser = subparsers.choices[name]
    if name in ("train", "script"):
        commands = "; ".join(f"{word} {does}" for word, does in COMMANDS.items())
        chosen.epilog = f"{chosen.epilog or ''} Commands, each with --help of its own: {commands}{SCRIPTS}."
    arguments, unknown = parser.parse_known_args([name, *own])
    if unknown:
        text = _before_script(unknown, name, own, rest, others)
        raise UsageError(f"{text or _unknown(unknown, name, own, chosen.flags(), others)}; see {chosen.prog} --help")
    arguments.rest = rest
    return command, arguments


def _before_script(
    unknown: Sequence[str], name: str, own: Sequence[str], rest: Sequence[str], others: Collection[str]
) -> str:
    """What does not belong before a script, where there is one; else nothing."""
    first = next((word for word in unknown if word.endswith(".py") or word == "-m"), None)
    if name == "train" and first is not None:
        own, rest = own[: own.index(first)], own[own.index(first) :]
    elif name != "script":
        return ""
    script = " ".join(rest[: 2 if rest[0] == "-m" else 1])
    allowed, training = _flags("script"), _flags("train")
    strange = [flag for flag in (word.partition("=")[0] for word in own) if flag[:1] == "-" and flag not in allowed]
    if name == "train" and not strange and all(word[:1] == "-" for word in own):
        return f"a script runs without the word train: `mpitrain {' '.join([*own, script])} ...`"
    misplaced = next((flag for flag in strange if flag in training), None)
    if misplaced is not None:
        return (
            f"{misplaced} is an option of the training that mpitrain has built in, and does not stand before a script: "
            f"what the script itself takes stands behind it, as in `mpitrain {script} {misplaced} ...`"
        )
    return _unknown(strange[:1] if name == "train" else unknown, "script", own, allowed, others) if strange else ""


def _flags(name: str) -> list[str]:
    """The options of a command."""
    parser = Parser()
    _module(name).add_parser(parser.add_subparsers(parser_class=Parser))
    return parser.flags()


def _unknown(
    unknown: Sequence[str], name: str, own: Sequence[str], flags: Collection[str], others: Collection[str]
) -> str:
    """What is wrong with arguments that a command does not know."""
    if unknown[0] in others:
        return f"{unknown[0]} stands before {own[0]}, which is for the ranks"
    if name == "train" and unknown[0][:1] != "-" and Path(unknown[0]).exists():
        return (
            f"{unknown[0]} is no script, whose name ends in .py; a module or package is run with -m, data with --data"
        )
    words = COMMANDS if name == "train" and own[:1] == unknown[:1] else ()
    near = difflib.get_close_matches(unknown[0].partition("=")[0], [*flags, *others, *words], 1, LIKENESS)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def _divide(argv: list[str]) -> tuple[str, list[str], list[str]]:
    """The command, its arguments, and what it hands on unread."""
    if not argv or argv == ["--version"]:
        return "train", argv, []
    if argv[0] in COMMANDS:
        divide = getattr(_module(argv[0]), "divide", None)
        own, rest = divide(argv[1:]) if divide else (argv[1:], [])
        return argv[0], own, rest
    own, rest = _module("script").divide(argv)
    return ("script", own, rest) if rest else ("train", argv, [])


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"mpitrain.cli.{name}")


def leave_with(error: UsageError) -> NoReturn:
    """Collective: tell all ranks of an error that this one may have alone, before the job's options are known.

    Raises:
        AgreedError: always; the other ranks are in the first agreement of their command.
    """
    from mpitrain.world.consensus import run_on_all
    from mpitrain.world.start import init

    world = init()

    def fail() -> None:
        raise error

    run_on_all(world.communicator, world.hosts, fail)
    raise AssertionError("together raises what its action raises")


def _refuse(error: UsageError, speak: bool) -> int:
    if speak:
        sys.stdout.flush()
        sys.stderr.write(f"mpitrain: {error}\n")
        sys.stderr.flush()
    return error.exit_code
