"""Runs a user's script on this rank, as plain Python would run it."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import TextIO

from mpitrain.checkpoint.output import DIRECTORY_MODE
from mpitrain.errors import UsageError
from mpitrain.runtime import streams
from mpitrain.scripts.changes import Changes
from mpitrain.scripts.delegation import delegate
from mpitrain.scripts.own_files import OwnFiles
from mpitrain.scripts.script_keras import ScriptKeras
from mpitrain.scripts.work_division import WorkDivision
from mpitrain.world.consensus import run_on_all
from mpitrain.world.world import World

# Libraries that train without Keras.
OTHERS = ("torch", "jax", "sklearn", "xgboost", "lightgbm")


@dataclass(frozen=True)
class Script:
    """What is to be run."""

    name: str  # path of a file, or with `is_module` the name of a module
    arguments: tuple[str, ...] = ()  # its own
    is_module: bool = False  # as with `python -m`

    @property
    def file(self) -> str:
        """Local: what Python calls the file: a script may leave its directory."""
        return os.path.abspath(self.name)  # noqa: PTH100 (Path.absolute leaves `..` where it is)


def run_unchanged(world: World, script: Script, prepare: Callable[[], None] = lambda: None) -> None:
    """Collective: run a script that divides its work itself, with nothing changed.

    Args:
        world: the job.
        script: what is to be run.
        prepare: called before it, when it is known that there is such a script.

    Raises:
        AgreedError: on all ranks: there is no such script.
    """
    code = run_on_all(world.communicator, world.hosts, lambda: _compiled(script))
    prepare()
    _execute(script, code)


def run(world: World, script: Script, output: Path, division: WorkDivision) -> None:
    """Collective: run `script` on all ranks, its training divided among them.

    With one rank nothing at all is changed. With more, ranks other than 0 print and warn to `rank-N.log` in
    `output`, and rank 0 writes there to `rank-0.log` what was changed.

    Raises:
        AgreedError: on all ranks: there is no such script, or no log can be written.
    """
    code = run_on_all(world.communicator, world.hosts, lambda: _prepare(world, script, output))
    if not world.exchanges and not division.dry_run:
        _execute(script, code)
        return
    changes = Changes()
    if not world.exchanges:
        changes.note("other", "one rank: the script runs as it is")
        print(changes)
        return
    _run_divided(world, script, code, division, changes, output)


def _run_divided(
    world: World, script: Script, code: types.CodeType | None, division: WorkDivision, changes: Changes, output: Path
) -> None:
    divided = ScriptKeras(world, division, changes)
    # All of this before the script's first line: what it imports by name afterwards is the patched one.
    divided.install_when_loaded()
    divided.shared_files.install()
    OwnFiles(changes.note, world.size, world.is_root).watch()
    ask = builtins.input
    builtins.input = lambda *prompt: delegate(world, "input", lambda: ask(*prompt))
    try:
        _execute(script, code)
    except BaseException as error:
        if world.is_root and isinstance(error, SystemExit) and not divided.trained:
            _say_nothing_was_divided(script, world, divided)
        if not divided.ended(error):
            raise
    else:
        if world.is_root and not divided.trained:
            _say_nothing_was_divided(script, world, divided)
    finally:  # scripts like to end with sys.exit
        if world.is_root:
            with (
                contextlib.suppress(OSError),
                _log(output, world.agreement.number(0)) as log,
            ):  # a disk may be full by now
                log.write(f"{changes}\n")
            if division.dry_run:
                print(changes, flush=True)


def _say_nothing_was_divided(script: Script, world: World, divided: ScriptKeras) -> None:
    others = [name for name in OTHERS if name in sys.modules]
    others_too = f" What {' and '.join(others)} trained was not divided either." if others else ""
    but = ", except for evaluate" if divided.evaluated else ""
    sys.stderr.write(
        f"mpitrain: {script.name} trained nothing that could be divided: no fit, no train_on_batch and no Keras "
        f"optimizer was used, so each of the {world.size} ranks did all of its work{but}.{others_too}\n"
    )


def _prepare(world: World, script: Script, output: Path) -> types.CodeType | None:
    """Local: the compiled script, and the log that this rank prints to."""
    if world.exchanges:
        try:
            output.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
            log = _log(output, world.agreement.number(world.rank))
        except OSError as error:
            raise UsageError(f"nothing can be written in {output} ({error.strerror}): give another --output") from error
        if not world.is_root:
            streams.lead_to(log)  # what warns on one rank warns on all; failures go past this
    return _compiled(script)


def _log(output: Path, rank: int) -> TextIO:
    """Local: it takes whatever is printed, also names that are not UTF-8."""
    return (output / f"rank-{rank}.log").open("w", buffering=1, encoding="utf-8", errors="backslashreplace")


def _compiled(script: Script) -> types.CodeType | None:
    """Local: the code of a file; None for a module."""
    if script.is_module:
        _find_module(script.name)
        return None
    try:
        # Bytes, as Python reads a script: the encoding is that of its first lines.
        with io.open_code(script.file) as file:
            return compile(file.read(), script.file, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"the script {script.name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of null bytes, in Python 3.10
        raise SyntaxError(str(error)) from None


def _find_module(name: str) -> None:
    """Local: see that there is such a module. Nothing of it is imported: Keras is not data-parallel yet."""
    _import_from(Path.cwd())
    parts = name.split(".")
    spec = importlib.util.find_spec(parts[0]) if all(map(str.isidentifier, parts)) else None
    for count in range(2, len(parts) + 1):
        spec = _inside(spec, ".".join(parts[:count]))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _inside(spec, f"{name}.__main__")
    if spec is None:
        raise UsageError(f"there is no module {name!r} that -m could run: name one that Python finds")


def _inside(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    places = package.submodule_search_locations if package is not None else None
    return PathFinder.find_spec(name, places) if places is not None else None


def _execute(script: Script, code: types.CodeType | None) -> None:
    """Local: what the interpreter does with a script or `-m module`."""
    try:
        _run_as_main(script, code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "horovod":
            error.msg += (
                "; Horovod is not installed, and mpitrain can stand in for it: put --as-horovod before the script"
            )
        raise


def _run_as_main(script: Script, code: types.CodeType | None) -> None:
    sys.argv = [script.name, *script.arguments]
    if code is None:
        runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script.file, __builtins__=builtins, __cached__=None)
    module.__loader__ = SourceFileLoader("__main__", script.file)
    # As under plain Python: `pickle` and `multiprocessing` look there for what the script defines.
    sys.modules["__main__"] = module
    _import_from(Path(script.name).resolve().parent)
    exec(code, module.__dict__)


def _import_from(place: Path) -> None:
    """Local: imports look there first, unless Python is told not to look in a place that the program leads to."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # which Python 3.10 does not have
        sys.path[0] = str(place)
