"""Runs pytest on all ranks of an MPI job: `mpirun -np N python -m pytest tests/spmd`.

Every rank runs the same tests in the same order. After each phase (setup, call, teardown) of a test the ranks
agree on its outcome: it fails on all if it failed on any, and rank 0 shows what the others said. Only rank 0
prints. A test that takes longer than its limit (marker `timeout_seconds`, default 300) prints the stacks of
the ranks and ends the job, so a deadlock is a failure and not a hang. A file of its own: it needs no other.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import pytest
from mpi4py import MPI

LIMIT_SECONDS = 300.0  # a test of some seconds took two minutes where ten processes wanted each core
START_SECONDS = 600.0  # all ranks load TensorFlow at once
PATIENCE_SECONDS = 10.0
USUAL = (1, 2, 3)  # numbers of ranks that run a test


@dataclass(frozen=True)
class Verdict:
    """What one rank says of one phase of a test."""

    test: str
    outcome: str
    text: str
    sections: tuple[tuple[str, str], ...]


def agreed_outcome(verdicts: list[Verdict]) -> str:
    """The outcome all ranks report: anything but the same passed or skipped everywhere is a failure."""
    outcomes = {(verdict.test, verdict.outcome) for verdict in verdicts}
    return verdicts[0].outcome if len(outcomes) == 1 else "failed"


def failure_text(verdicts: list[Verdict], own: int) -> str:
    """What the ranks whose verdict was not "passed" said; rank `own` prints its captured output itself."""
    blocks = []
    for rank, verdict in enumerate(verdicts):
        if verdict.outcome == "passed":
            continue
        title = f"rank {rank} of {len(verdicts)}: {verdict.outcome} in {verdict.test}"
        captured = [] if rank == own else [f"--- {name} ---\n{text}" for name, text in verdict.sections]
        blocks.append("\n".join([title, "=" * len(title), verdict.text, *captured]))
    passed = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == "passed"]
    if passed:
        blocks.append(f"passed on ranks: {', '.join(map(str, passed))}")
    return "\n\n".join(blocks)


class Agreement:
    """The pytest plugin of one rank."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.communicator = communicator
        self.rank: int = communicator.Get_rank()
        # Standard error as it was before pytest captured it.
        self.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        self.shared = Path(communicator.bcast(self._shared_directory(), root=0))
        self._arm(START_SECONDS)

    def _shared_directory(self) -> str | None:
        return tempfile.mkdtemp(prefix="spmd-") if self.rank == 0 else None

    def _arm(self, seconds: float) -> None:
        self.limit_seconds = seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.stderr)

    def abort(self, text: str) -> NoReturn:
        """Ends the whole job, non-zero, whatever the other ranks wait for."""
        self.stderr.write(f"rank {self.rank} ends the job:\n{text}\n")
        self.stderr.flush()
        time.sleep(0.5)  # MPICH's launcher drops what it has not read when a rank aborts
        MPI.COMM_WORLD.Abort(1)
        os._exit(1)

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An exception outside of pytest's own handling."""
        self.abort("".join(traceback.format_exception(kind, error, trace)))

    def _wait_for_others(self, verdict: Verdict) -> None:
        """Collective: returns when all ranks are here; a rank that failed says so if that takes long.

        Usually the others then wait in a collective that this rank left by its failure: without these lines
        the time limit would show their stacks, and not the cause.
        """
        request = self.communicator.Ibarrier()
        patience = time.monotonic() + min(PATIENCE_SECONDS, self.limit_seconds / 2)
        told = verdict.outcome == "passed"
        while not request.Test():
            if not told and time.monotonic() > patience:
                self.stderr.write(
                    f"rank {self.rank}: {verdict.outcome} in {verdict.test}; "
                    f"the others are not done with it\n{verdict.text}\n"
                )
                told = True
                self._arm(self.limit_seconds)  # anew: the others, which this rank's end would end, show theirs first
            time.sleep(0.0002)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Collective: the outcome of one phase of one test, on all ranks."""
        report: pytest.TestReport = yield  # type: ignore[assignment]
        verdict = Verdict(
            test=f"{item.nodeid} ({report.when})",
            outcome=report.outcome,
            text=report.longreprtext,
            sections=tuple(report.sections),
        )
        self._wait_for_others(verdict)
        verdicts = self.communicator.allgather(verdict)
        outcome: Any = agreed_outcome(verdicts)
        if outcome == "failed":
            report.outcome = outcome
            report.longrepr = failure_text(verdicts, self.rank)
            if hasattr(report, "wasxfail"):  # some rank did not fail as expected
                del report.wasxfail
        return report  # type: ignore[return-value]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """The time limit of one test."""
        marker = item.get_closest_marker("timeout_seconds")
        self._arm(float(marker.args[0]) if marker else LIMIT_SECONDS)
        result = yield
        self._arm(LIMIT_SECONDS)  # for what comes between tests, and for the end
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Collective: all ranks have collected the same tests, in the same order."""
        mine = (session.testsfailed, [item.nodeid for item in session.items])
        everyone = self.communicator.allgather(mine)
        different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if different:
            names = set(everyone[0][1]) ^ set(everyone[different[0]][1])
            self.abort(
                f"ranks {different} collected other tests than rank 0, or in another order "
                f"(collection errors by rank: {[errors for errors, _ in everyone]}). "
                f"Different: {sorted(names)[:10]}"
            )
        self._arm(LIMIT_SECONDS)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that only some ranks cannot import would else be told by rank 0 alone."""
        if report.failed and self.rank != 0:
            self.stderr.write(f"rank {self.rank} cannot collect {report.nodeid}:\n{report.longreprtext}\n")

    def pytest_internalerror(self, excrepr: object) -> None:
        """The other ranks would wait for this one."""
        self.abort(str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """As `pytest_internalerror`; but collection errors, the same on all ranks, end the usual way."""
        if not isinstance(excinfo.value, pytest.Session.Interrupted):
            self.abort(str(excinfo.getrepr()))

    def pytest_unconfigure(self) -> None:
        """Collective: removes the directory of this run."""
        self.communicator.Barrier()
        if self.rank == 0:
            shutil.rmtree(self.shared, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Collective: installs the plugin, before pytest's own plugins read the options."""
    config.addinivalue_line("markers", "timeout_seconds(seconds): the time limit of a test on several ranks")
    config.addinivalue_line(
        "markers", "ranks(numbers): of ranks that run a test; 1, 2 and 3 without it, more would show nothing more"
    )
    config.addinivalue_line("markers", "mpich: a test that is also run under MPICH")
    agreement = Agreement(MPI.COMM_WORLD.Dup())
    sys.excepthook = agreement.excepthook
    # Ranks that start together would else race for the next free number in one directory.
    config.option.basetemp = str(agreement.shared / f"rank{agreement.rank}")
    config.pluginmanager.register(agreement, "agreement")
    if agreement.rank != 0:  # these print nothing
        config.pluginmanager.set_blocked("terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what other numbers of ranks, or the other MPI, show: tests take longer the more ranks share the cores.

    MPIs do not differ in what TensorFlow and Keras do: MPICH runs the tests of what is sent, and of how ranks part.
    """
    size, is_mpich = MPI.COMM_WORLD.Get_size(), "MPICH" in MPI.Get_library_version()

    def shows_something(item: pytest.Item) -> bool:
        if is_mpich and item.get_closest_marker("mpich") is None:
            return False
        marks = [set(mark.args) for mark in item.iter_markers("ranks")]
        return size in (set.intersection(*marks) if marks else USUAL)

    left_out = [item for item in items if not shows_something(item)]
    items[:] = [item for item in items if shows_something(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """Collective: a new, empty directory, the same on all ranks; `tmp_path` is each rank's own."""
    agreement: Any = request.config.pluginmanager.get_plugin("agreement")
    path = None
    if agreement.rank == 0:
        path = tempfile.mkdtemp(dir=agreement.shared)
    return Path(agreement.communicator.bcast(path, root=0))
