"""A file for each cluster that runs: clients find the servers by it, and whoever takes it away stops them.

It lies where only its user can read and write, also over a shared home directory, so no port has to be opened, and
no password invented, for somebody to ask a cluster to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from mpitrain.cluster.jobs import Cluster
from mpitrain.errors import UsageError
from mpitrain.faults.processes import Process
from mpitrain.runtime import cache

VARIABLE = "MPITRAIN_CLUSTER"  # the file's path, for a client that `mpitrain serve` starts
DEFAULT_NAME = "default"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
# A cluster that lives touches its file; one that has not for so long has ended without taking it away.
BEAT_SECONDS, DEAD_SECONDS = 2.0, 30.0
LOOK_SECONDS = 0.1


@dataclass
class Record:
    """The file of one cluster."""

    path: Path  # where it is

    @classmethod
    def named(cls, name: str, environ: Mapping[str, str]) -> Record:
        """Local: of the cluster with that name.

        Raises:
            UsageError: it cannot be the name of a file.
        """
        if not NAME.fullmatch(name):
            raise UsageError(f"cluster name {name!r}: expected letters, digits, and _ . - behind the first")
        return cls(cache.directory(environ) / "clusters" / f"{name}.json")

    @property
    def stopping(self) -> Path:
        """What the file is called from the request to stop to the end."""
        return self.path.with_suffix(".stopping")

    def check(self) -> None:
        """Local: see whether the name is free.

        Raises:
            UsageError: another cluster of that name runs.
        """
        if self.is_alive():
            raise UsageError(
                f"a cluster named {self.path.stem} runs already ({self.path}): stop it with `mpitrain serve --stop "
                f"--name {self.path.stem}`, or give this one another --name"
            )

    def write(self, cluster: Cluster) -> None:
        """Local: tell that the cluster runs.

        Raises:
            UsageError: another one of that name runs, or nothing can be written there.
        """
        self.check()
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.stopping.unlink(missing_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:  # for this user alone
                root = {"host": os.uname().nodename, "process": astuple(Process.current())}
                json.dump({"jobs": cluster.as_dict(), "rank 0": root}, file)
            Path(file.name).replace(self.path)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): set XDG_CACHE_HOME") from error

    def read(self) -> Cluster:
        """Local: the cluster, as a client sees it.

        Raises:
            UsageError: none of that name runs.
        """
        try:
            if cache.is_foreign(self.path):
                raise UsageError(
                    f"{self.path} says where the servers of a cluster are, and others than you may have written it: "
                    "let it and its directory be yours, and for nobody else to write (chmod go-w)"
                )
            jobs = json.loads(self.path.read_text())["jobs"]
            return Cluster({str(job): tuple(map(str, addresses)) for job, addresses in jobs.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(
                f"no cluster named {self.path.stem} runs ({self.path}): start one with `mpirun -np 3 python -m "
                "mpitrain serve --jobs ps=1,worker=2`"
            ) from None

    def beat(self) -> bool:
        """Local: tell that the cluster lives; False when it is to stop."""
        try:
            os.utime(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a file system that is away for a while
        return True

    def is_alive(self) -> bool:
        """Local: the cluster runs, as far as its file tells."""
        for path in (self.path, self.stopping):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < DEAD_SECONDS:
                    return True
        return False

    def remove(self) -> None:
        """Local: the cluster has ended."""
        for path in (self.path, self.stopping):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def stop(self, timeout_seconds: float) -> bool:
        """Local: ask the cluster to stop, and wait until it has.

        Returns:
            Whether it ended; False also means that it may have ended before, without taking its file away.

        Raises:
            UsageError: none of that name runs.
        """
        self.read()
        # In one step, by which the cluster knows at its next beat that it is to stop, and clients do not find it any
        # more.
        self.path.replace(self.stopping)
        root = self._root()
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            gone = root is not None and root.state() in (None, "Z")
            if not self.stopping.exists() and (gone or root is None):
                return True
            if self.stopping.exists() and (gone or not self.is_alive()):
                break
            time.sleep(LOOK_SECONDS)
        self.remove()
        return False

    def _root(self) -> Process | None:
        """Rank 0, where it is on this host."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            root = json.loads(self.stopping.read_text())["rank 0"]
            return Process(*root["process"]) if root["host"] == os.uname().nodename else None
        return None


def find(name: str | None = None) -> Cluster:
    """Local: the cluster that `mpitrain serve` has started, for its clients. Imports no TensorFlow.

    Args:
        name: as given to `--name`. Else, in a client that `mpitrain serve` has started, the cluster it is of; else the
            one without a name of its own.

    Raises:
        UsageError: it does not run.

    Example:
        >>> cluster = mpitrain.cluster.find()  # doctest: +SKIP
    """
    if name is None and VARIABLE in os.environ:
        return Record(Path(os.environ[VARIABLE])).read()
    return Record.named(name or DEFAULT_NAME, os.environ).read()
