"""Private names of Keras are used behind one door only, and those of others by their list."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.unit.test_layers import MODULES, PACKAGE, Function, all_imports, each_module, tree_of

DOOR = PACKAGE / "runtime" / "keras_private.py"
OF_OTHERS = {
    *("_current_frames", "_exit", "_getframe", "_replace"),  # Python
    *("_actions", "_option_string_actions", "_print_message"),  # its argparse
    *("_create_slots", "_inputs", "_jit_compile"),  # TensorFlow
    "_handleof",  # mpi4py
}


def is_private(name: object) -> TypeGuard[str]:
    """Whether it is a name that begins with one underscore."""
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and name.strip("_") == name[1:]


def made_names(tree: ast.AST) -> set[str]:
    """Functions, methods, classes, and what is assigned to `self` or in a class or module."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return found | {node.attr for node in assigned if ast.unparse(node.value) in ("self", "cls")}


@functools.cache
def known_names() -> tuple[set[str], set[str]]:
    """Private names that are used behind the door, as attributes or in quotes; and all that the package makes."""
    trees = {path: tree_of(path) for path in MODULES}
    used = [getattr(node, "attr", getattr(node, "value", None)) for node in ast.walk(trees.pop(DOOR))]
    return {name for name in used if is_private(name)}, set().union(*map(made_names, trees.values()))


def around_the_door(tree: ast.AST) -> Iterator[str]:
    """What a module uses of Keras' that no public name leads to."""
    behind, made = known_names()
    own = made_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in behind:
            yield f"{node.value!r} (line {node.lineno})"
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_OTHERS:
            owner = ast.unparse(node.value)
            is_own = node.attr in own and owner in ("self", "cls")
            if not is_own and (node.attr in behind or node.attr not in made or owner == "super()"):
                yield f"{owner}.{node.attr} (line {node.lineno})"


@each_module
def test_those_of_keras_stay_behind_their_door(path: Path) -> None:
    if path != DOOR:
        assert [name for _, name in all_imports(path) if name.startswith("keras.src")] == []
        assert list(around_the_door(tree_of(path))) == []


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("optimizer._iterations.assign(0)", False),
        ("setattr(optimizer, '_clip_gradients', f)", False),
        ("self._iterations", False),
        ("self._iterations = iter(x); self._iterations", True),
        ("model._of_a_new_keras", False),
        ("super()._moments(x, mask)", False),
        ("os._exit(0)", True),
        ("keras_private.step_counter(optimizer)", True),
    ],
)
def test_the_rule_itself(statement: str, allowed: bool) -> None:
    assert (list(around_the_door(ast.parse(statement))) == []) == allowed
