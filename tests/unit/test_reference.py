"""The tables of the documentation that are made from the code."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpitrain
from mpitrain.checkpoint.options import CheckpointOptions
from mpitrain.cli import doctor, run, serve
from mpitrain.cli.parser import Parser
from mpitrain.cli.rank_options import RankOptions
from mpitrain.config import Option, options, own_options
from mpitrain.faults.options import FaultOptions
from mpitrain.scripts.options import ScriptOptions
from mpitrain.strategies.parameter_server.options import ServerOptions
from mpitrain.trainer.options import TrainConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
# What functions return, and nobody makes.
RETURNED = [
    "mpitrain.World",
    *(f"mpitrain.cluster.{name}" for name in ("Cluster", "Server", "Task")),
    *(f"mpitrain.placement.{name}" for name in ("Row", "Table")),
]


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
        argument = next((argument for argument, one in own_options(table).items() if one.name == name), None)
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


def public() -> dict[str, Any]:
    """Each public name, and what it is."""
    found = {f"mpitrain.{name}": getattr(mpitrain, name) for name in sorted(mpitrain.__all__) if name != "__version__"}
    modules = (mpitrain.callbacks, mpitrain.cluster, mpitrain.placement)
    return found | {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}


def first_line(thing: Any) -> str:
    """Of its documentation."""
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def members(kind: type) -> dict[str, Any]:
    """The public methods and properties that a class has of its own, and does not override."""
    inherited = {name for base in kind.__mro__[1:] for name in vars(base)}
    own_members = {name: one for name, one in vars(kind).items() if not name.startswith("_") and name not in inherited}
    return {name: one for name, one in own_members.items() if callable(one) or isinstance(one, property)}


def documented_names() -> list[str]:
    """The rows of docs/api.md."""
    found = []
    for name, thing in public().items():
        home = "" if inspect.ismodule(thing) else f"`{thing.__module__.removeprefix('mpitrain.').replace('.', '/')}.py`"
        found.append(f"| `{name}` | {home} | {first_line(thing)} |")
        for member, one in members(thing).items() if isinstance(thing, type) else ():
            found.append(f"| `{name.rpartition('.')[2]}.{member}` | | {first_line(one)} |")
    errors = [one for one in vars(mpitrain.errors).values() if inspect.isclass(one) and issubclass(one, Exception)]
    return [*found, *(f"| `mpitrain.errors.{one.__name__}` | `errors.py` | {first_line(one)} |" for one in errors)]


def test_all_public_names_stand_in_the_documentation() -> None:
    """When it fails: `python tests/unit/test_reference.py` prints the rows."""
    assert rows("api.md") == documented_names()


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse(Path(mpitrain.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname == alias.name}
    homes = {name: "mpitrain" for name in mpitrain._MODULES if name != "errors"}
    assert seen == homes | mpitrain._HOME
    assert all(getattr(mpitrain, name).__module__ == home for name, home in mpitrain._HOME.items())


def undescribed(name: str, thing: Any) -> list[str]:
    """The arguments of a function or class that its documentation does not tell of, nor its table of options."""
    told, kind = inspect.getdoc(thing) or "", thing if isinstance(thing, type) else type(None)
    known = {"self", *(own_options(kind) if dataclasses.is_dataclass(kind) else ())}
    return [
        f"{name}({one})" for one in inspect.signature(thing).parameters if one not in known and f" {one}: " not in told
    ]


def test_arguments_are_described() -> None:
    things = {name: thing for name, thing in public().items() if not inspect.ismodule(thing) and name not in RETURNED}
    for name, thing in list(things.items()):
        methods = members(thing).items() if isinstance(thing, type) else ()
        things |= {f"{name}.{member}": one for member, one in methods if inspect.isfunction(one)}
    assert [one for name, thing in things.items() for one in undescribed(name, thing)] == []


def test_examples(tmp_path: Path) -> None:
    """Each public function and class has an example, which does what it says."""
    names = {"mpitrain": mpitrain, "keras": keras, "np": np, "tf": tf, "json": json, "directory": tmp_path}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(verbose=False)
    without = []
    for name, thing in public().items():
        if not inspect.ismodule(thing):
            tests = finder.find(thing, name, globs=dict(names))
            without += [] if any(test.examples for test in tests) else [name]
            for test in tests:
                runner.run(test)
    assert without == RETURNED
    assert runner.summarize(verbose=False).failed == 0


if __name__ == "__main__":
    print(*documented_options(), "", *documented_commands(), "", *documented_names(), sep="\n")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_of_the_map_exist(page: str) -> None:
    root = DOCS.parent
    named = set(re.findall(r"`([\w.]+/[\w./]*)`", (root / page).read_text()))
    assert {name for name in named if not any((base / name).exists() for base in (root, root / "mpitrain"))} == set()
