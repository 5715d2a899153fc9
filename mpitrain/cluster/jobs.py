"""The jobs and tasks of a TensorFlow cluster, and which rank is which task. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpitrain.errors import UsageError
from mpitrain.runtime.counted import counted

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
# Where clients connect unless they say so: TensorFlow's customary names of jobs that compute.
COMPUTING = ("chief", "master", "worker")


@dataclass(frozen=True)
class Task:
    """One process of a cluster, such as `/job:worker/task:1`.

    Attributes:
        job: its job.
        index: its number among the tasks of that job, from 0.
    """

    job: str
    index: int

    @property
    def device(self) -> str:
        """Its name in `tf.device`."""
        return f"/job:{self.job}/task:{self.index}"


@dataclass(frozen=True)
class Cluster:
    """Where each task can be reached.

    Attributes:
        jobs: for each job the addresses `host:port` of its tasks.
        task: that of this process; None in a client.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task: Task | None = field(default=None)

    def as_dict(self) -> dict[str, list[str]]:
        """Local: as `tf.train.ClusterSpec` takes it."""
        return {job: list(addresses) for job, addresses in self.jobs.items()}

    def tasks(self) -> dict[Task, str]:
        """Local: the address of each task, in the order of the ranks."""
        return {Task(job, index): at for job, found in self.jobs.items() for index, at in enumerate(found)}

    def target(self, job: str | None = None, index: int = 0) -> str:
        """Local: what `tf.compat.v1.Session` and `tf.config.experimental_connect_to_host` take.

        Args:
            job: else this process' own task, or in a client the first that computes.
            index: of the task in that job.

        Raises:
            UsageError: there is no such task.
        """
        task = Task(job, index) if job is not None else self.task or self._first()
        address = self.tasks().get(task)
        if address is None:
            names = ", ".join(f"{job} ({len(found)})" for job, found in self.jobs.items())
            raise UsageError(f"the cluster has no task {task.device}; its jobs, with their numbers of tasks: {names}")
        return f"grpc://{address}"

    def tf_config(self) -> str:
        """Local: the text that TensorFlow's strategies look for in the variable TF_CONFIG."""
        found: dict[str, object] = {"cluster": self.as_dict()}
        if self.task is not None:
            found["task"] = {"type": self.task.job, "index": self.task.index}
        return json.dumps(found)

    def _first(self) -> Task:
        return Task(next((job for job in COMPUTING if job in self.jobs), next(iter(self.jobs))), 0)


def sizes(jobs: str | Mapping[str, int], ranks: int) -> dict[str, int]:
    """Local: the number of tasks of each job.

    Args:
        jobs: as in `ps=1,worker=2`, or a mapping. One job of a text may stand without a number: it gets the ranks
            that are left.
        ranks: of the MPI job, one for each task.

    Raises:
        UsageError: it is no such text, or the tasks are not as many as the ranks.
    """
    pairs = [_pair(part, jobs) for part in jobs.split(",")] if isinstance(jobs, str) else list(jobs.items())
    open_jobs = [job for job, count in pairs if count is None]
    names = [job for job, _ in pairs]
    if len(set(names)) < len(names) or len(open_jobs) > 1 or not all(NAME.fullmatch(name) for name in names):
        raise UsageError(f"jobs {jobs!r}: {_EXPECTED}")
    named = sum(count for _, count in pairs if count is not None)
    found = {job: ranks - named if count is None else count for job, count in pairs}
    if sum(found.values()) != ranks or min(found.values(), default=0) < 1:
        tasks = named + len(open_jobs)
        raise UsageError(
            f"jobs {jobs!r} need {'at least ' * bool(open_jobs)}{counted(tasks, 'rank')}, one for each "
            f"task, but there are {ranks}: mpirun -np {tasks}, or other --jobs"
        )
    return found


_EXPECTED = (
    "expected different names, each with its number of tasks, as in ps=1,worker=2; one may stand without a number, "
    "as in ps=1,worker, and gets the ranks that are left"
)


def _pair(part: str, jobs: str) -> tuple[str, int | None]:
    name, equals, count = (word.strip() for word in part.partition("="))
    if equals and not (count.isdecimal() and int(count) > 0):
        raise UsageError(f"jobs {jobs!r}: {_EXPECTED}")
    return name, int(count) if equals else None


def task_of(sizes: Mapping[str, int], rank: int) -> Task:
    """Local: ranks are tasks in the order in which the jobs are named."""
    for job, count in sizes.items():
        if rank < count:
            return Task(job, rank)
        rank -= count
    raise ValueError(f"rank is {rank} too large for {dict(sizes)}")


def arrange(sizes: Mapping[str, int], addresses: list[str], rank: int) -> Cluster:
    """Local: the cluster of ranks that can be reached at these addresses."""
    jobs: dict[str, tuple[str, ...]] = {}
    start = 0
    for job, count in sizes.items():
        jobs[job] = tuple(addresses[start : start + count])
        start += count
    return Cluster(jobs, task_of(sizes, rank))
