"""What a script asks of files, and does to them, without Keras: rank 0 does it, once all ranks have come there.

So all ranks take the same branch of `if os.path.exists(path): shutil.rmtree(path)`; none looks for what another has
removed already, and none removes what another has written since. No TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.scripts.delegation import delegate
from mpitrain.scripts.file_names import Names, paths_in
from mpitrain.scripts.own_files import is_of_the_script, share_directories
from mpitrain.world.world import World

ASKING: tuple[tuple[Any, str], ...] = (
    *((os.path, name) for name in ("exists", "lexists", "isfile", "isdir")),
    *((Path, name) for name in ("exists", "is_file", "is_dir")),
    *((os, "listdir"), (glob, "glob")),
)
REMOVING: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("remove", "unlink", "rmdir", "rename", "replace")),
    (shutil, "rmtree"),
)
OF_TENSORFLOW = ("remove", "rename", "rmtree"), ("exists", "isdir", "listdir", "glob")  # in `tf.io.gfile`
THROUGH = ("os", "shutil", "pathlib", "posixpath", "genericpath")  # by which a script calls these
Note = Callable[[str, str], None]


class SharedFiles:
    """Makes of such a call one of all ranks.

    Args:
        note: told what is changed, as (part, text).
        apart: whether ranks may stand at different places of the script. There nobody waits.
    """

    def __init__(self, world: World, note: Note, apart: Callable[[], bool], names: Names) -> None:
        self._world, self._note, self._apart, self._names = world, note, apart, names
        self.enabled = True  # all ranks make the same calls, as no forked child of theirs does
        self._forget = share_directories()
        os.register_at_fork(after_in_child=self.leave_alone)

    def leave_alone(self) -> None:
        """Local: from now on this process does what it does for itself."""
        self.enabled = False

    def install(self) -> None:
        """Local: patch what code of the script calls; installed packages may do it on one rank, behind a lock."""
        for owner, name in REMOVING:
            self._replace(owner, name, _by_the_script, removes=True)
        for owner, name in ASKING:
            self._replace(owner, name, _by_the_script, removes=False)

    def install_of_tensorflow(self, gfile: Any) -> None:
        """Local: patch `tf.io.gfile`, also for packages, which use it where they come without locks."""
        for removes, names in zip((True, False), OF_TENSORFLOW, strict=True):
            for name in names:
                self._replace(gfile, name, lambda: True, removes)

    def _replace(self, owner: Any, name: str, concerns: Callable[[], bool], removes: bool) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Threads come to their calls in any order, and a collective needs one.
            on_main = threading.current_thread() is threading.main_thread()
            paths = paths_in([*args, *kwargs.values()])
            if not (self.enabled and paths and on_main and concerns()):
                return function(*args, **kwargs)
            if self._apart():
                own = self._names.written_here(paths) or paths[0].startswith(tempfile.gettempdir() + os.sep)
                return function(*args, **kwargs) if own or not removes else None
            if not removes:
                return delegate(self._world, name, lambda: function(*args, **kwargs), paths)
            self._note("files", f"{name}: by rank 0, once all ranks have come there")
            self._forget(paths[0])
            return delegate(self._world, name, lambda: self._act(function, args, kwargs, paths[0]), paths, True)

        setattr(owner, name, call)

    def _act(self, function: Callable[..., Any], args: Any, kwargs: Any, path: str) -> Any:
        """Local: other ranks act, too, on what they name differently, or what is there on their hosts."""
        if self._world.is_root:
            return function(*args, **kwargs)
        with contextlib.suppress(FileNotFoundError):
            return function(*args, **kwargs) if os.path.lexists(path) else None
        return None


def _by_the_script() -> bool:
    """Local: whether code that is not installed makes the call, itself or by `Path.unlink` and the like."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in THROUGH:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and is_of_the_script(frame)
