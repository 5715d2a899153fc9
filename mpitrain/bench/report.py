"""The records a measurement returns, and where it was made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpitrain.comm.all_reduce import describe
from mpitrain.world.world import World

SETTINGS = (
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_XLA_FLAGS",
    "MPITRAIN_ALL_REDUCE",
    "MPITRAIN_ENGINE",
)  # variables that change the figures
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "mpi4py", "horovod")


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    case: dict[str, str | int]  # what was measured, as in {"model": "mlp50k"}
    raw: dict[str, tuple[float, ...]]  # every single measurement, unit in the name, as in {"alone_seconds": (0.1, 0.2)}
    # what the table shows, medians and their ratios; None where there is no such number
    figures: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """One run of a benchmark."""

    benchmark: str  # its name
    setting: dict[str, Any]  # machine, versions and arguments
    rows: tuple[Row, ...]  # in the order measured

    def as_json(self) -> dict[str, Any]:
        """Local: plain dictionaries and lists."""
        return asdict(self)


def median(seconds: Iterable[float]) -> float:
    """Local: the median; nan of nothing, as on ranks that did not measure."""
    values = list(seconds)
    return statistics.median(values) if values else float("nan")


def ratio(numerator: float, denominator: float) -> float | None:
    """Local: None where the denominator is not positive."""
    return numerator / denominator if denominator > 0 else None


def machine(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Local: what a reader needs to judge the figures, for this process alone."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arguments": dict(arguments),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "versions": _versions(),
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def job(world: World) -> dict[str, Any]:
    """Collective: the ranks, their cores, and how their buffers are summed."""
    cores = world.communicator.all_gather_obj(len(os.sched_getaffinity(0)))
    return {
        "ranks": world.size,
        "hosts": list(world.hosts),
        "cores_of_each_rank": cores,
        "threads": asdict(world.threads),
        "device": world.devices.description,
        "mpi": getattr(world.communicator, "library", ""),
        "all_reduce": describe(world.all_reduce.setting()) if world.size > 1 else "",
        "all_reduce_seconds": dict(world.all_reduce.measurements),
    }


def _versions() -> dict[str, str]:
    found = importlib.metadata.distributions()
    installed = {str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in found}
    return {name: installed[name] for name in PACKAGES if name in installed}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
