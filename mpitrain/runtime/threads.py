"""How many threads each rank's TensorFlow gets, so that the ranks of a host do not fight for its cores."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from mpitrain.errors import UsageError

INTRA_VARIABLE = "TF_NUM_INTRAOP_THREADS"
INTER_VARIABLE = "TF_NUM_INTEROP_THREADS"
OPENMP_VARIABLE = "OMP_NUM_THREADS"
# The thread that waits in MPI occupies one: with a single one, nothing runs beside the exchange.
FEWEST_INTER = 2


@dataclass(frozen=True)
class ThreadPlan:
    """Sizes of TensorFlow's thread pools."""

    intra: int  # threads that share the work of one operation
    inter: int  # operations that run at the same time
    openmp: int | None = None  # threads of libraries that use OpenMP, or None where the user has set them

    @property
    def environment(self) -> dict[str, str]:
        """The variables to set before TensorFlow starts."""
        variables = {INTRA_VARIABLE: str(self.intra), INTER_VARIABLE: str(self.inter)}
        return variables if self.openmp is None else {**variables, OPENMP_VARIABLE: str(self.openmp)}


def available_cores() -> frozenset[int]:
    """Local: the cores this process may run on, which the launcher may have narrowed (binding)."""
    return frozenset(os.sched_getaffinity(0))


def physical_cores(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Local: the cores this process may use, without hyper-threads: what MPIs count as slots."""

    def core(cpu: int) -> object:
        try:
            place = folder / f"cpu{cpu}" / "topology"
            return tuple((place / name).read_text() for name in ("physical_package_id", "core_id"))
        except OSError:
            return cpu

    return len({core(cpu) for cpu in available_cores()})


def plan(
    cores: Sequence[frozenset[int]],
    local_rank: int,
    intra: int | None = None,
    inter: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> ThreadPlan:
    """Divide the cores of a host among its ranks.

    A core that k ranks may use counts 1/k for each of them. What is asked for wins, then what stands in the environment
    (`TF_NUM_INTRAOP_THREADS`, ...), then the share of the cores. Below 2 inter-op threads nothing runs beside the
    exchange.

    Raises:
        UsageError: fewer than one thread was asked for.
    """
    environ = os.environ if environ is None else environ
    users = Counter(core for own in cores for core in own)  # ranks that may use a core
    share = max(1, int(sum(Fraction(1, users[core]) for core in cores[local_rank])))
    intra = _chosen("intra-op", intra, environ.get(INTRA_VARIABLE), share)
    inter = _chosen("inter-op", inter, environ.get(INTER_VARIABLE), max(FEWEST_INTER, share))
    return ThreadPlan(intra, inter, None if environ.get(OPENMP_VARIABLE) else intra)


def _chosen(pool: str, asked: int | None, set_already: str | None, default: int) -> int:
    if asked is not None:
        if asked < 1:
            raise UsageError(f"{asked} {pool} threads asked for: expected at least 1, or nothing for the default")
        return asked
    # TensorFlow takes 0, and what is no number, for "not set"; so do we.
    return int(set_already) if set_already and set_already.isdecimal() and int(set_already) else default
