"""Files that a script makes without Keras: every rank makes them. What can be done about it, and a word on the rest."""

from __future__ import annotations

import functools
import os
import stat
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

CLOCKS_SECONDS = 60.0  # by which the clock of a file server may be behind
# Packages that write what somebody else tells them to.
WRITERS = ("numpy", "pandas", "PIL", "h5py", "matplotlib", "scipy", "sklearn", "joblib", "imageio", "pyarrow")
INSTALLED = tuple(str(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
Note = Callable[[str, str], None]


def share_directories() -> Callable[[str], None]:
    """Local: a directory that another rank of this job has made is as good as made by this one.

    All ranks come to the same `os.mkdir`, and on a file system that they share one of them is the first. A script
    that makes a directory for the second time still learns that it is there, and so does one that makes a directory
    which is older than the job.

    Returns:
        To be told which path is no more.
    """
    began, taken, make = time.time() - CLOCKS_SECONDS, set[Path](), os.mkdir

    @functools.wraps(make)
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = Path.cwd() / os.fsdecode(path)
        try:
            make(path, mode, dir_fd=dir_fd)
        except FileExistsError:
            if dir_fd is not None or place in taken or not _new_directory(place, began):
                raise
        # From now on it is there for this rank, too: a second `mkdir` fails as in one process.
        taken.update((place, *place.parents))

    def forget(path: str) -> None:
        place = Path.cwd() / path
        taken.difference_update([one for one in taken if place in (one, *one.parents)])

    os.mkdir = mkdir
    return forget


def _new_directory(path: Path, began: float) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_mtime >= began


class OwnFiles:
    """Tells of the files that the script opens for writing.

    Args:
        note: told what is different from one process, as (part, text).
        ranks: how many write them.
        is_root: this is rank 0, which warns of files that get everything several times.
    """

    def __init__(self, note: Note, ranks: int, is_root: bool) -> None:
        self._note, self._ranks, self._is_root = note, ranks, is_root
        self._seen: set[str] = set()

    def watch(self) -> None:
        """Local: from now on, to the end of the process."""
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        mode = arguments[1]
        if isinstance(mode, str) and set(mode) & set("wax+"):
            path = os.fsdecode(arguments[0])
            if path not in self._seen and not path.startswith(("/dev/", "/proc/")) and not path.endswith(".pyc"):
                self._seen.add(path)
                if _by_the_script():
                    self._tell(path, mode)

    def _tell(self, path: str, mode: str) -> None:
        name = Path(path).name
        self._note("files", f"{name}: opened by the script itself, so every rank writes it")
        if "a" in mode and self._is_root:
            sys.stderr.write(
                f"mpitrain: the script appends to {name} itself, and so does each of the {self._ranks} ranks: print "
                "the lines, or let Keras write them (CSVLogger)\n"
            )


def _by_the_script() -> bool:
    """Local: whether code that is not installed opens the file, through the standard library or a `WRITERS` package."""
    frame = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "tempfile":
            return False
        if package not in WRITERS and (package not in sys.stdlib_module_names or package == "__main__"):
            return is_of_the_script(frame)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_of_the_script(frame: FrameType) -> bool:
    """Local: whether it runs code that is not installed."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    installed = package == "mpitrain" or (package in sys.stdlib_module_names and package != "__main__")
    return not installed and not frame.f_code.co_filename.startswith(INSTALLED)
