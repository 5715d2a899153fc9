"""What scripts ask of files and do to them is asked and done once, for all ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpitrain.scripts import shared_files
from mpitrain.scripts.file_names import Names
from mpitrain.scripts.shared_files import SharedFiles
from mpitrain.world.world import World
from tests.unit.job import run


@pytest.fixture(autouse=True)
def _each_rank_is_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose only thread is its main thread, and whose `os.mkdir` is put back."""
    monkeypatch.setattr(threading, "main_thread", threading.current_thread)
    monkeypatch.setattr(os, "mkdir", os.mkdir)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)


class Own:
    """The functions of one rank, patched for it alone; `calls` counts those that reach the file system."""

    remove: Any
    rename: Any
    rmtree: Any
    exists: Any
    listdir: Any

    def __init__(self, world: World, apart: bool = False, concerns: Callable[[], bool] = lambda: True) -> None:
        self.calls = 0
        self.notes: list[str] = []
        self.names = Names(world.communicator)
        self.shared = SharedFiles(world, lambda part, text: self.notes.append(text), lambda: apart, self.names)
        for owner, name in ((os, "remove"), (os, "rename"), (shutil, "rmtree")):
            self._take(owner, name, concerns, removes=True)
        for owner, name in ((os.path, "exists"), (os, "listdir")):
            self._take(owner, name, concerns, removes=False)

    def _take(self, owner: Any, name: str, concerns: Callable[[], bool], removes: bool) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        setattr(self, name, counted)
        self.shared._replace(self, name, concerns, removes)


def test_all_ranks_take_the_same_branch(tmp_path: Path) -> None:
    """A directory is looked for and removed again and again: no rank looks for what another has removed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log").touch()

    def rank(world: World) -> Any:
        own, seen = Own(world), []
        for _ in range(3):
            if own.exists(tmp_path / "run"):
                seen.append(sorted(own.listdir(str(tmp_path / "run"))))
                own.rmtree(tmp_path / "run")
            else:
                seen.append(["none"])
        assert own.notes == ["rmtree: by rank 0, once all ranks have come there"]
        return seen, own.calls

    found = run(3, rank)
    assert [seen for seen, _ in found] == [[["log"], ["none"], ["none"]]] * 3
    assert [calls for _, calls in found] == [5, 0, 0]


def test_an_error_is_that_of_all_ranks(tmp_path: Path) -> None:
    def rank(world: World) -> None:
        own = Own(world)
        with pytest.raises(FileNotFoundError, match="absent"):
            own.remove(tmp_path / "absent")
        with pytest.raises(FileNotFoundError, match="absent"):
            own.listdir(tmp_path / "absent")

    run(2, rank)


def test_what_is_on_other_hosts_or_named_otherwise_is_removed_too(tmp_path: Path) -> None:
    for rank_number in range(3):
        (tmp_path / f"own {rank_number}").touch()
    (tmp_path / "all").touch()

    def rank(world: World) -> Any:
        own = Own(world)
        own.remove(tmp_path / f"own {world.rank}")
        own.remove(tmp_path / "all")
        return own.calls

    assert run(3, rank)[0] == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("temporary", [True, False])
def test_within_a_fit_only_who_writes_a_file_removes_it(
    tmp_path: Path, temporary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path) if temporary else elsewhere)

    def rank(world: World) -> Any:
        path = tmp_path / f"of rank {world.rank}"
        path.touch()
        own = Own(world, apart=True)
        own.remove(path)
        return own.calls, own.exists(path)

    assert run(2, rank) == [(1, False), (1, False) if temporary else (0, True)]


@pytest.mark.parametrize("why", ["installed", "thread", "child", "descriptor"])
def test_calls_that_are_a_rank_s_own(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "thread":
        monkeypatch.setattr(threading, "main_thread", lambda: None)

    def rank(world: World) -> int:
        own = Own(world, concerns=lambda: why != "installed")
        if why == "child":
            own.shared.leave_alone()
        if why == "descriptor":
            descriptor = os.open(tmp_path, os.O_RDONLY)
            own.listdir(descriptor)
            os.close(descriptor)
        else:
            own.exists(tmp_path)
        return own.calls

    assert run(2, rank) == [1, 1]


def test_whose_call_it_is(tmp_path: Path) -> None:
    """The script's, also by way of `pathlib` and `shutil`; not that of a package."""
    asked: list[bool] = []

    def ask(*_: Any) -> bool:
        asked.append(shared_files._by_the_script())
        return True

    def within(module: str) -> Callable[[], Any]:
        scope: dict[str, Any] = {"__name__": module, "ask": ask}
        exec(compile("def call():\n    return ask()\n", f"/{module}.py", "exec"), scope)
        return scope["call"]  # type: ignore[no-any-return]

    within("pathlib")()
    within("mpitrain.checkpoint.files")()
    within("json")()
    within("own_module")()
    ask()
    # `_by_the_script` looks at who called the function that called it: the patched one in between.
    assert asked == [True, False, False, True, True]
