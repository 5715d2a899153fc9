"""Do all ranks run the same program? Compared once, at the start."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = ("tensorflow", "tensorflow-cpu", "tf-nightly", "keras", "numpy", "mpi4py")
# Settings that change what is computed, or how, and what they are where they are not set. Others may differ: launchers
# do not hand all variables on to other hosts.
VARIABLES = {
    "KERAS_BACKEND": "tensorflow",
    "MPITRAIN_ALL_REDUCE": "",
    "MPITRAIN_ENGINE": "auto",
    "NVIDIA_TF32_OVERRIDE": "",
    "PYTHONHASHSEED": "random",
    "TF_DETERMINISTIC_OPS": "",
    "TF_ENABLE_ONEDNN_OPTS": "",
    "TF_XLA_FLAGS": "",
    "XLA_FLAGS": "",
}
MOST_MODULES, MOST_COLUMNS, WIDTH = 500, 4, 60
ABSENT = "-"


def program(environ: Mapping[str, str], library: str) -> dict[str, str]:
    """Local: what this rank runs, by names for the table."""
    found = {"Python": platform.python_version(), "MPI": library, "arguments": shlex.join(sys.argv[1:])}
    found.update({package: version for package in PACKAGES if (version := _version(package))})
    found.update({f"variable {name}": environ.get(name, default) for name, default in VARIABLES.items()})
    return found | _code()


def differences(programs: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    """Local: a table of what is not the same on all ranks, or None."""
    names = list(dict.fromkeys(name for one in programs for name in one))
    unlike = [name for name in names if len({one.get(name) for one in programs}) > 1]
    if not unlike:
        return None
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, one in enumerate(programs):
        groups.setdefault(tuple(one.get(name, ABSENT) for name in unlike), []).append(rank)
    shown = list(groups.items())[:MOST_COLUMNS]
    rows = [["", *(_ranks(ranks, hosts) for _, ranks in shown)]]
    for position, name in enumerate(unlike):
        values = [values[position] for values, _ in shown]
        rows.append([name, *(_from_difference(value, values) for value in values)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = [] if len(groups) <= MOST_COLUMNS else [f"and {len(groups) - MOST_COLUMNS} more kinds of ranks"]
    return "\n".join(["ranks do not run the same program:", *(f"  {line}" for line in [*lines, *more])])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code() -> dict[str, str]:
    """Checksums of mpitrain, and of the modules loaded so far that are not installed: the user's own."""
    package = Path(__file__).resolve().parents[1]
    whole = hashlib.blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        whole.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    found = {"code of mpitrain": whole.hexdigest()}
    installed = {Path(path).resolve() for path in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix)}
    # A copy: another thread may import something meanwhile.
    for name, module in list(sys.modules.items())[: 100 * MOST_MODULES]:
        file = getattr(module, "__file__", None)
        if len(found) > MOST_MODULES or not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        if package in path.parents or any(parent in installed for parent in path.parents):
            continue
        try:
            found[f"code of {name}"] = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
        except OSError:
            continue
    return found


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    places = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown} ({places})"


def _from_difference(text: str, others: Sequence[str]) -> str:
    """`text`, or where it is long the part from a little before the first difference on."""
    if len(text) <= WIDTH:
        return text or ABSENT
    same = 0
    while all(len(other) > same and other[same] == text[same] for other in [*others, text]):
        same += 1
    start = max(0, same - 10)
    return ("..." if start else "") + text[start : start + WIDTH] + ("..." if start + WIDTH < len(text) else "")
