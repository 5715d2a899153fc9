"""Which host this is."""

from __future__ import annotations

import hashlib
import os


def host_hash(salt: str | None = None) -> str:
    """Local: a name that processes of one host have in common, and no others."""
    name = os.uname().nodename
    digest = hashlib.md5(f"{name}-{salt}".encode(), usedforsecurity=False).hexdigest()
    return f"{name.split('.')[0]}-{digest}"
