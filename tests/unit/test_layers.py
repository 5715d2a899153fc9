"""The shape of the package: which module may import which, and how long things are."""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mpitrain"
# From top to bottom. Imports point down only; those in one row know nothing of each other.
LAYERS = (
    ("cli",),
    ("bench", "doctor"),
    ("launch", "horovod"),
    ("scripts", "trainer", "callbacks"),
    ("checkpoint",),
    ("training",),
    ("strategies",),
    ("observe", "data"),
    ("reduction",),
    ("collectives", "cluster", "placement"),
    ("world",),
    ("comm", "native"),
    ("faults",),
    ("runtime",),
    ("config",),
    ("errors",),
)
DEPTH = {name: depth for depth, row in enumerate(LAYERS) for name in row}
LIGHT = ("cli", "world", "comm", "faults", "launch", "doctor", "cluster", "placement")
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80
MEDIAN_MODULE_LINES = 120
USUAL_FUNCTION_LINES = 30  # of 95 in 100 functions
LARGEST_SHARE = 0.12  # of one folder in the package; of horovod's names there are many
COMMENTS = (5.5, 10)  # in 100 lines of code; about 6 are wanted
TESTS = 0.8  # lines of tests for one of the package
# What no unit test imports, and none is named after: entry points that start processes or stand under Horovod's names,
# and the way out of a process.
WITHOUT_UNIT_TEST = {
    *("__init__.py", "__main__.py", "callbacks.py", "cluster/client_main.py", "bench/eager.py"),
    *("faults/exits.py", "faults/job_end.py", "runtime/exit_codes.py", "cluster/options.py", "strategies/options.py"),
    *("collectives/bucket.py", "collectives/native_engine.py", "collectives/native_session.py", "native/operation.py"),
    *("collectives/one_rank.py", "reduction/statistics.py"),
    *(f"horovod/common/{name}.py" for name in ("elastic", "process_sets")),
    *(f"horovod/keras/{name}.py" for name in ("callbacks", "elastic")),
    *(f"horovod/tensorflow/{name}.py" for name in ("elastic", "mpi_ops", "keras/callbacks", "keras/elastic")),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def part(path: Path) -> str:
    """The folder of the package a module is in, or its own name at the top."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(node: ast.AST, path: Path) -> list[str]:
    """The absolute names an import statement asks for; none for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        here = ("mpitrain", *path.relative_to(PACKAGE).parts[:-1])
        base = ".".join([*here[: len(here) - node.level + 1], *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """A module, parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of its nodes."""
    return list(ast.walk(tree_of(path)))


def all_imports(path: Path) -> list[tuple[int, str]]:
    """Line and name of every import of a module, those in functions too."""
    return [(node.lineno, name) for node in nodes_of(path) for name in imported(node, path)]  # type: ignore[attr-defined]


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: not function bodies, nor `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_module_level(child)


def breach(path: Path, name: str) -> str | None:
    """Why the module must not import that name, or None."""
    names = name.split(".")
    here = part(path)
    if names[0] == "mpi4py" and here != "comm":
        return "mpi4py is imported in comm/ only"
    if names[0] != "mpitrain" or here in ("__init__", "__main__"):
        return None
    there = names[1] if len(names) > 1 else ""
    if there == "__version__" and here == "cli":
        return None  # of the package itself, which loads nothing
    if there == here and here in DEPTH:
        return None
    if there not in DEPTH:
        return f"'{there or 'mpitrain'}' is no layer below {here}"
    return None if DEPTH[there] > DEPTH[here] else f"imports point down only: {there} is not below {here}"


def functions(path: Path) -> list[Function]:
    """Every function and method of a module."""
    return [node for node in nodes_of(path) if isinstance(node, Function)]


def undocumented(body: list[ast.stmt]) -> Iterator[str]:
    """Public functions and classes without a docstring; methods too, unless a base class has them."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        marks = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        if ast.get_docstring(node) is None and not any(mark in marks for mark in ("overload", "setter")):
            yield f"{node.name} (line {node.lineno})"
        if isinstance(node, ast.ClassDef) and all(ast.unparse(base) == "Protocol" for base in node.bases):
            yield from undocumented(node.body)


def code_and_comments(path: Path) -> tuple[int, int]:
    """Lines of code, without blank ones, docstrings and those that are comments alone; and lines with a comment."""
    source = path.read_text()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [node.body[0] for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.body]
    texts = [one for one in firsts if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)]
    left_out = {number for one in texts for number in range(one.lineno, (one.end_lineno or 0) + 1)}
    comments = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:")):
            comments.add(token.start[0])
            left_out |= {token.start[0]} if token.line.lstrip().startswith("#") else set()
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and number not in left_out for number, line in lines), len(comments)


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    finished = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def lines_of(path: Path) -> int:
    """How long a module is."""
    return len(path.read_text().splitlines())


def module_graph() -> dict[str, set[str]]:
    """By file, the other files of the package that it imports, in functions and for type checkers too."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    del files["mpitrain"]  # it names all there is, and loads it when it is used
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = (name.split(".") for _, name in all_imports(path))
        prefixes = ((".".join(parts[:end]) for end in range(len(parts), 0, -1)) for parts in names)
        found = (next((prefix for prefix in longest_first if prefix in files), module) for longest_first in prefixes)
        graph[module] = set(found) - {module}
    return graph


each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def test_every_part_has_its_layer() -> None:
    assert {part(path) for path in MODULES} - {"__init__", "__main__"} <= set(DEPTH)


@each_module
def test_imports_point_down(path: Path) -> None:
    found = [(line, name, breach(path, name)) for line, name in all_imports(path)]
    assert [f"{path}:{line}: import of {name}: {why}" for line, name, why in found if why] == []


@each_module
def test_light_parts_name_no_tensorflow_at_the_top(path: Path) -> None:
    tree = tree_of(path)
    names = [name for node in at_module_level(tree) for name in imported(node, path)]
    heavy = [name for name in names if name.split(".")[0] in ("tensorflow", "keras")]
    assert part(path) not in LIGHT or heavy == []


@each_module
def test_sizes(path: Path) -> None:
    assert lines_of(path) <= MAX_MODULE_LINES
    long = [node.name for node in functions(path) if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES]  # type: ignore[operator]
    assert long == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    graph = module_graph()
    assert "mpitrain.world.world" in graph["mpitrain.world.start"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_sizes_of_all() -> None:
    lengths = sorted(node.end_lineno - node.lineno + 1 for path in MODULES for node in functions(path))  # type: ignore[operator]
    assert lengths[len(lengths) * 95 // 100] < USUAL_FUNCTION_LINES
    assert statistics.median(map(lines_of, MODULES)) <= MEDIAN_MODULE_LINES
    total = sum(map(lines_of, MODULES))
    shares = {name: sum(lines_of(path) for path in MODULES if part(path) == name) / total for name in DEPTH}
    assert [name for name, share in shares.items() if share > LARGEST_SHARE and name != "horovod"] == []


def test_comments_and_tests_keep_up_with_the_code() -> None:
    code, comments = map(sum, zip(*map(code_and_comments, MODULES), strict=True))
    assert COMMENTS[0] <= 100 * comments / code <= COMMENTS[1]
    tests = sum(map(lines_of, Path(__file__).parents[1].rglob("*.py")))
    assert tests >= TESTS * sum(map(lines_of, MODULES))


def test_every_module_is_known_to_a_unit_test() -> None:
    tests = list(Path(__file__).parent.rglob("*.py"))
    known = {name for path in tests for _, name in all_imports(path)}
    known |= {name.rpartition(".")[0] for name in known}
    named = {path.relative_to(Path(__file__).parent) for path in tests}
    unknown = []
    for path in MODULES:
        place = path.relative_to(PACKAGE)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if module not in known and place.with_name(f"test_{place.name}") not in named and place.name != "__init__.py":
            unknown.append(str(place))
    assert set(unknown) <= WITHOUT_UNIT_TEST, "a mistake in it would be found by mpirun alone"


@each_module
def test_protocols_are_not_made(path: Path) -> None:
    classes = [node for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    protocols = [node for node in classes if any(ast.unparse(base) == "Protocol" for base in node.bases)]
    inits = [node.name for node in protocols for made in node.body if getattr(made, "name", "") == "__init__"]
    assert inits == [], "Python 3.10 takes __init__ away from them, and from what derives from them"


@each_module
def test_docstrings(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{path} does not say what it is for"
    assert list(undocumented(tree.body)) == []


@pytest.mark.parametrize("used", ["", "mpitrain.init(); mpitrain.barrier; mpitrain.all_gather_obj; "])
def test_the_package_and_what_needs_no_tensors_is_light(used: str) -> None:
    loaded = "[m for m in ('mpi4py.MPI', 'tensorflow', 'keras') if m in sys.modules]"
    assert run(f"import sys, mpitrain; {used}print({loaded})") == "[]"


@pytest.mark.parametrize("name", LIGHT)
def test_light_parts_load_no_tensorflow(name: str) -> None:
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in MODULES if part(path) == name]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"]
    code = (
        "import importlib, sys, mpi4py\n"
        "mpi4py.rc.initialize = False\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print([m for m in ('tensorflow', 'keras') if m in sys.modules])"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize(
    ("module", "statement", "allowed"),
    [
        ("comm/mpi.py", "from mpi4py import MPI", True),
        ("runtime/gpus.py", "from mpi4py import MPI", False),
        ("world/world.py", "from mpitrain.runtime import topology", True),
        ("world/world.py", "from mpitrain import errors", True),
        ("world/world.py", "from .groups import split", True),
        ("runtime/topology.py", "from ..comm import mpi", False),
        ("runtime/topology.py", "import mpitrain.comm.mpi", False),
        ("runtime/topology.py", "from mpitrain import __version__", False),
        ("observe/ranks.py", "from mpitrain.data import source", False),
        ("errors.py", "from mpitrain import config", False),
        ("__init__.py", "from mpitrain.training import optimizer", True),
    ],
)
def test_the_rules_themselves(module: str, statement: str, allowed: bool) -> None:
    path = PACKAGE / module
    reasons = [breach(path, name) for node in ast.walk(ast.parse(statement)) for name in imported(node, path)]
    assert (set(reasons) == {None}) == allowed


def test_the_rules_see_what_runs_at_import() -> None:
    tree = ast.parse(
        "if TYPE_CHECKING:\n    import a\ntry:\n    import b\nexcept ImportError:\n    pass\ndef f():\n    import c\n"
    )
    assert [name for node in at_module_level(tree) for name in imported(node, PACKAGE / "x.py")] == ["b"]


def test_the_rules_see_missing_docstrings() -> None:
    tree = ast.parse(
        "def f(): pass\ndef _f(): pass\n"
        "class C:\n  'doc'\n  def m(self): pass\n"
        "class D(C):\n  'doc'\n  def m(self): pass\n"
    )
    assert list(undocumented(tree.body)) == ["f (line 1)", "m (line 5)"]


def test_unit_tests_stand_where_their_modules_do() -> None:
    tests = Path(__file__).parent
    found = [path.relative_to(tests) for path in tests.rglob("test_*.py") if path.parent != tests]
    modules = [PACKAGE / path.parent / path.name.removeprefix("test_") for path in found]
    assert [path for path in modules if not path.exists() and not path.with_suffix("").is_dir()] == []


def test_type_checkers_are_told_that_the_package_is_annotated() -> None:
    assert (PACKAGE / "py.typed").is_file()
