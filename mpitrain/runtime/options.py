"""What each rank uses of its host, as the user can choose it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mpitrain.config import option

GPUS = (("device", ("gpu", "auto")),)
MOST_THREADS = 10**4


@dataclass(frozen=True)
class MachineOptions:
    """What this rank computes on."""

    device: str = option("auto", "what each rank computes on", choices=("auto", "cpu", "gpu"))
    gpu_memory: str | None = option(
        None, "of a GPU, for each rank: growth, a fraction, or MiB", metavar="SIZE", needs=GPUS
    )
    share_gpus: bool = option(False, "let several ranks use one GPU", needs=GPUS)
    visible_devices: str | None = option(
        None, "GPUs of each host that ranks may use, as in 0,2", metavar="LIST", needs=GPUS
    )
    intra_threads: int | None = option(None, "threads within an operation, per rank", least=1, below=MOST_THREADS)
    inter_threads: int | None = option(None, "operations at the same time, per rank", least=1, below=MOST_THREADS)
    verbose: bool = option(False, "keep the messages of TensorFlow; tell which way gradients take, and why")

    def arguments(self) -> dict[str, Any]:
        """Local: as `mpitrain.init` takes them."""
        found = dataclasses.asdict(self)
        threads = (found.pop("intra_threads"), found.pop("inter_threads"))
        return {**found, "threads": None if threads == (None, None) else threads}
