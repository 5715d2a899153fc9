"""Where mpitrain keeps small files of its user's between jobs: below the home directory, never in a place for all."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

OTHERS_MAY_WRITE = 0o022


def directory(environ: Mapping[str, str]) -> Path:
    """Local: the directory, which may not exist. Without `XDG_CACHE_HOME` and `HOME` the account's home is taken."""
    base = environ.get("XDG_CACHE_HOME")
    return Path(base or Path(environ.get("HOME") or account_home()) / ".cache") / "mpitrain"


def is_foreign(path: Path) -> bool:
    """Local: whether somebody else may have written a file: it, or its directory, is another user's or open to others.

    Raises:
        OSError: it does not.
    """
    looked = [path.lstat(), path.parent.stat()]
    return any(seen.st_uid not in (os.geteuid(), 0) or seen.st_mode & OTHERS_MAY_WRITE for seen in looked)


def account_home() -> str:
    """Local: the home directory of the account, whatever `HOME` says."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # a user that the host does not know, as in containers
        return f"/nonexistent/{os.geteuid()}"
