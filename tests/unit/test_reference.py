"""The tables of the documentation that are made from the code."""

from __future__ import annotations

import inspect
from pathlib import Path

import mpitrain
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.cli import doctor, run, serve
from mpitrain.cli.machine import RankOptions
from mpitrain.cli.parser import Parser
from mpitrain.config import Option, options, own
from mpitrain.faults.options import FaultOptions
from mpitrain.scripts.options import ScriptOptions
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.trainer.options import TrainConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str) -> list[str]:
    """The rows of the tables of a page."""
    lines = (DOCS / page).read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.endswith(" what |")]


def shown(one: Option) -> str:
    """The default of an option, and what else it may be."""
    default = "" if one.default is None or one.default is False else str(one.kind(one.default)).removesuffix(".0")
    others = [f"`{value}`" for value in one.choices if value != default]
    return ", ".join([*([f"**{default}**"] if default else []), *others])


def python_of(name: str) -> str:
    """Where a program of one's own gives an option."""
    if name in inspect.signature(mpitrain.init).parameters:
        return f"`init({name}=)`"
    if name.endswith("_threads"):
        return "`init(threads=)`"
    classes = {mpitrain.ParameterServer: ServerOptions, mpitrain.callbacks.Checkpoint: CheckpointOptions}
    for public, table in classes.items():
        argument = next((argument for argument, one in own(table).items() if one.name == name), None)
        if argument is not None:
            return f"`{public.__name__}({argument}=)`"
    return ""


def documented_options() -> list[str]:
    """The rows of docs/options.md on the tables of options."""
    commands: dict[str, type] = {
        "train": TrainConfig,
        "script": ScriptOptions,
        "serve": RankOptions,
        "bench": RankOptions,
    }
    found: dict[Option, list[str]] = {}
    for command, table in commands.items():
        for one in options(table, command).values():
            same = next((other for other in found if (other.name, other.help) == (one.name, one.help)), one)
            found.setdefault(same, []).append(command)
    for table in (FaultOptions, ServerOptions):
        found |= {one: [] for one in options(table).values() if one.commands == ()}
    return [
        f"| {f'`{one.flag}`' if takers else ''} | {shown(one)} | {', '.join(takers)} | "
        f"{f'`{one.environment}`' if one.environment else ''} | {python_of(one.name)} | {one.help} |"
        for one, takers in found.items()
    ]


def documented_commands() -> list[str]:
    """The rows of docs/options.md on commands that have options of their own, beside those of the tables."""
    parser = Parser(prog="mpitrain")
    subparsers = parser.add_subparsers(parser_class=Parser)
    for command in (run, serve, doctor):
        command.add_parser(subparsers)
    shared = {one.flag for one in options(RankOptions, "serve").values()}
    return [
        f"| {', '.join(f'`{flag}`' for flag in action.option_strings)} | {command} | {action.help} |"
        for command, child in subparsers.choices.items()
        for action in child._actions
        if action.option_strings and action.dest != "help"
        if command == "run" or action.option_strings[0] not in shared
    ]


def test_all_options_stand_in_the_documentation() -> None:
    """When it fails: `python tests/unit/test_reference.py` prints the rows."""
    assert rows("options.md") == [*documented_options(), *documented_commands()]


if __name__ == "__main__":
    print(*documented_options(), "", *documented_commands(), sep="\n")
