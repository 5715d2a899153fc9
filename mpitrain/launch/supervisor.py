"""Starts a job, hands on its output and signals, and tells how it went, whatever the launcher's exit code says."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mpitrain.errors import LauncherError
from mpitrain.launch.first_end import End, FirstEnd
from mpitrain.launch.listener import Listener
from mpitrain.launch.ssh_program import NO_CONNECTION, SshProgram
from mpitrain.runtime import process_tree
from mpitrain.runtime.hostfile import is_same_host
from mpitrain.runtime.output_files import directory_of

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHUNK_BYTES, TAIL_BYTES = 1 << 16, 1 << 13
TICK_SECONDS = 0.25
HYDRA, OPEN_MPI, SRUN = "Hydra", "Open MPI", "srun"
# After the launcher has ended, output may still be on its way from processes it has left behind.
DRAIN_SECONDS = 1.0
# In which a launcher that was told to end, or has lost a host, ends; then it is told again, at last by SIGKILL.
LOST_SECONDS = 3.0
# In which processes that the launcher has left behind end on SIGTERM.
ORPHAN_SECONDS = 1.0


@dataclass(frozen=True)
class Plan:
    """How one job is run."""

    argv: tuple[str, ...]  # program and arguments
    environ: Mapping[str, str]  # its variables
    secret: str  # what marks of its ranks begin with
    launcher: str  # `Open MPI`, `Hydra` or `srun`; they differ in what they do on signals
    ranks: int  # of the job
    is_ours: bool  # the ranks are of mpitrain, and tell when they have met
    start_timeout_seconds: float  # in which all ranks must have met
    grace_seconds: float  # between a signal that ends the job and SIGKILL
    output: Path | None = None  # directory for the output of each rank, or None
    shrinks_by_hosts: bool = False  # once ranks have met, the job goes on when a host is lost
    # in which the launcher ends once ranks have told what ends the job: Open MPI's has been seen to stay for ever
    fault_seconds: float = 30.0


@dataclass
class Outcome:
    """How a job went."""

    code: int  # of the launcher: its exit code, or 128 and the signal that ended it
    listener: Listener  # what the ranks told
    # hosts whose ssh failed, and its exit code; when a job fails, the launcher may have ended it
    ssh_codes: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # hosts whose connection ended while the launcher went on
    tail: bytes = b""  # the end of what was written to standard error
    signals: list[int] = field(default_factory=list)  # those that were handed on
    timed_out: bool = False  # the ranks did not meet in time
    seconds: float = 0.0  # it ran
    silent: bool = False  # Hydra has ended ranks that had begun, and none has told why
    first: End | None = None  # then, where it is known

    @property
    def finished(self) -> bool:
        """Rank 0 has told that the job is done."""
        return 0 in self.listener.ranks("finished")

    @property
    def succeeded(self) -> bool:
        """Rank 0 has told that the job is done and that it ends with 0, and no rank that it ends otherwise."""
        codes = {mark.rank: mark.detail for mark in self.listener.marks if mark.event == "finished"}
        return codes.get(0) == "0" and set(codes.values()) == {"0"}

    @property
    def met(self) -> bool:
        """Rank 0 has told that all ranks have met."""
        return 0 in self.listener.ranks("met")

    def reached(self, host: str) -> bool:
        """Something has been heard from there, or could have been."""
        return self.met or any(is_same_host(host, name) for name in self.listener.hosts())


class Supervisor:
    """Runs one job. For the main thread of a process that does nothing else."""

    def __init__(self, plan: Plan, agent: SshProgram | None = None, pending: list[int] | None = None) -> None:
        self._plan, self._agent = plan, agent
        self._outcome = Outcome(0, Listener(plan.secret))
        self._pending = [] if pending is None else pending
        self._ends = FirstEnd()
        self._leaving: set[str] = set()  # hosts whose connection has ended; perhaps the launcher is about to end, too
        self._told: float | None = None  # when ranks told what ends the job
        self._stays = False  # the launcher did not end then
        self._ending: list[tuple[float, int]] = []  # when the launcher is sent which signal, unless it ends before

    def run(self) -> Outcome:
        """Local: start the job, and wait for its end. No process of it is left on this host.

        Raises:
            LauncherError: it cannot be started.
        """
        process_tree.adopt_orphans()
        started = time.monotonic()
        with Signals(self._pending) as wakeup, _files(self._plan.output) as copies:
            process = self._start()
            try:
                self._watch(process, wakeup, copies, started)
            finally:
                process_tree.end_descendants(0.0 if self._ending else ORPHAN_SECONDS)
                code = process.wait()
                self._note_hosts()
                self._note_first_end()
        fault = self._outcome.listener.fault
        self._outcome.code = fault.exit_code if fault and self._stays else 128 - code if code < 0 else code
        self._outcome.seconds = time.monotonic() - started
        return self._outcome

    def _start(self) -> subprocess.Popen[bytes]:
        """The launcher, in a session of its own: it gets each signal once, from here, and asks no terminal."""
        me = os.getpid()
        # Hydra hands SIGTERM to its ranks, which may go on, and they end when it is killed; Open MPI vice versa.
        end = signal.SIGKILL if self._plan.launcher == HYDRA else signal.SIGTERM
        try:
            return subprocess.Popen(
                self._plan.argv,
                env=dict(self._plan.environ),
                stdin=subprocess.PIPE if sys.stdin is not None and sys.stdin.isatty() else None,
                stdout=subprocess.PIPE if self._plan.output else None,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: process_tree.die_with_parent(end, me),  # noqa: PLW1509 (there are no threads here)
            )
        except OSError as error:
            raise LauncherError(f"{self._plan.argv[0]} cannot be started: {error}") from error

    def _watch(
        self, process: subprocess.Popen[bytes], wakeup: int, copies: Mapping[str, IO[bytes]], started: float
    ) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wakeup, selectors.EVENT_READ, lambda: _emptied(wakeup))
            if process.stderr is not None:
                self._pump(selector, process.stderr.fileno(), 2, copies.get("stderr"), self._heard)
            if process.stdout is not None:
                self._pump(selector, process.stdout.fileno(), 1, copies.get("stdout"), bytes)
            if process.stdin is not None:
                self._pump_input(selector, process.stdin)
            ended: float | None = None
            while True:
                for key, _ in selector.select(TICK_SECONDS):
                    key.data()
                now = time.monotonic()
                if process.poll() is None:
                    self._react(process, now, started)
                    continue
                ended = ended or now
                outputs = [key for key in selector.get_map().values() if key.fd != wakeup]
                if not outputs or now - ended > DRAIN_SECONDS:
                    return

    def _heard(self, data: bytes) -> bytes:
        shown = self._outcome.listener.feed(data)
        self._ends.watch(self._outcome.listener.marks)
        self._outcome.tail = (self._outcome.tail + shown)[-TAIL_BYTES:]
        return shown

    def _pump(
        self,
        selector: selectors.BaseSelector,
        source: int,
        target: int,
        copy: IO[bytes] | None,
        shown: Callable[[bytes], bytes],
    ) -> None:
        """Hand on what comes from a pipe, as it comes."""

        def move() -> None:
            data = os.read(source, CHUNK_BYTES)
            text = shown(data)
            _write_all(target, text)
            if copy is not None:
                copy.write(text)
                copy.flush()
            if not data:
                selector.unregister(source)

        selector.register(source, selectors.EVENT_READ, move)

    def _pump_input(self, selector: selectors.BaseSelector, target: IO[bytes]) -> None:
        """Hand on what is typed: the launcher, in its own session, may not read the terminal."""

        def move() -> None:
            if os.tcgetpgrp(0) != os.getpgrp():
                return  # in the background: to read would stop this process
            data = os.read(0, CHUNK_BYTES)
            with contextlib.suppress(BrokenPipeError):
                target.write(data)
                target.flush()
            if not data:
                selector.unregister(0)
                target.close()

        selector.register(0, selectors.EVENT_READ, move)

    def _react(self, process: subprocess.Popen[bytes], now: float, started: float) -> None:
        """To signals, to hosts that are gone, and to the time."""
        while self._pending:
            self._forward(process, self._pending.pop(0), now)
        listener = self._outcome.listener
        self._leaving |= self._note_hosts()
        if self._leaving and not self._ending:
            self._ending = [(now + LOST_SECONDS, signal.SIGTERM), (now + 2 * LOST_SECONDS, signal.SIGKILL)]
        if listener.fault is not None and self._told is None:
            self._told = now
        if self._told is not None and now - self._told > self._plan.fault_seconds and not self._ending:
            self._stays = True
            self._ending = [(now, signal.SIGTERM), (now + LOST_SECONDS, signal.SIGKILL)]
        late = now - started > self._plan.start_timeout_seconds and (self._plan.is_ours or listener.marks)
        if late and not self._outcome.met and not self._ending:
            self._outcome.timed_out = True
            self._ending = [(now, signal.SIGTERM), (now + LOST_SECONDS, signal.SIGKILL)]
        while self._ending and now >= self._ending[0][0]:
            self._outcome.lost |= self._leaving
            process.send_signal(self._ending[0][1])
            if len(self._ending) == 1:
                break  # SIGKILL, again and again
            self._ending.pop(0)

    def _note_hosts(self) -> set[str]:
        """The hosts whose connection has ended since the last call, and without which the job will end."""
        told = [*(self._agent.ended() if self._agent else ()), *self._outcome.listener.connections()]
        new = {host: code for host, code in told if code and self._outcome.ssh_codes.get(host) != code}
        self._outcome.ssh_codes |= new
        gone = {host for host, code in new.items() if code == NO_CONNECTION}
        if not (self._plan.shrinks_by_hosts and self._outcome.met):
            return gone
        self._outcome.lost |= gone
        for host in sorted(gone):
            _write_all(2, f"mpitrain: the connection to {host} was lost; the other hosts go on without it\n".encode())
        return set()

    def _note_first_end(self) -> None:
        listener, signals = self._outcome.listener, self._outcome.signals
        # Other launchers leave ranks the time to tell; and there, the first may be one that the others went on without.
        kills_at_once = self._plan.launcher == HYDRA
        if kills_at_once and listener.fault is None and not (signals or self._outcome.timed_out):
            finished = listener.ranks("finished")
            self._outcome.silent = not finished.keys() >= listener.ranks("begun").keys()
            self._outcome.first = self._ends.of(self._plan.ranks, without=finished)
        self._ends.close()

    def _forward(self, process: subprocess.Popen[bytes], signum: int, now: float) -> None:
        again = signum in ENDING_SIGNALS and any(other in ENDING_SIGNALS for other in self._outcome.signals)
        self._outcome.signals.append(signum)
        if signum not in ENDING_SIGNALS:
            process.send_signal(signum)
            return
        if again:  # whoever asks twice will not wait
            self._ending = [(now, signal.SIGTERM), (now + LOST_SECONDS, signal.SIGKILL)]
            return
        process.send_signal(self._translated(signum))
        end = now + self._plan.grace_seconds
        self._ending = [(end, signal.SIGTERM), (end + LOST_SECONDS, signal.SIGKILL)]

    def _translated(self, signum: int) -> int:
        """The signal that makes this launcher do what the one sent here asks for."""
        if self._plan.launcher != HYDRA and self._outcome.listener.is_graceful:
            # Told to end, Open MPI kills the ranks after a second, and srun cancels the step. SIGUSR1 both hand on, to
            # ranks that then come to an end.
            return signal.SIGUSR1
        if signum == signal.SIGHUP or self._plan.launcher == SRUN:
            return signal.SIGTERM  # Hydra dies of SIGHUP and leaves word to nobody; srun answers SIGINT with a status
        return signum


class Signals:
    """Notes signals for a loop, and wakes it. The handlers before are put back at the end."""

    def __init__(self, pending: list[int]) -> None:
        self._pending = pending

    def __enter__(self) -> int:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            signum: signal.signal(signum, lambda number, _: self._pending.append(number))
            for signum in FORWARDED_SIGNALS
        }
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self._read

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def _files(directory: Path | None) -> Iterator[dict[str, IO[bytes]]]:
    """The files for what is shown here: rank 0's output, and the launcher's own."""
    if directory is None:
        yield {}
        return
    own = directory_of(directory, 0)
    with contextlib.ExitStack() as stack:
        try:
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            files: dict[str, IO[bytes]] = {
                name: stack.enter_context((own / name).open("wb")) for name in ("stdout", "stderr")
            }
        except OSError as error:
            raise LauncherError(
                f"nothing can be written in {own} ({error.strerror}): give another --output-filename"
            ) from error
        yield files


def _emptied(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, CHUNK_BYTES)


def _write_all(descriptor: int, data: bytes) -> None:
    """To a terminal or pipe that may have been closed; the job goes on."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
