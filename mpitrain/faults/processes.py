"""What the operating system tells about processes of this host (Linux); None where it does not."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpitrain.runtime.exit_codes import BY_SIGNAL

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a network file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}
PIDFD_INFO, PIDFD_INFO_EXIT = "=QQ11Ii", 1 << 3  # mask, control group, numbers of process and users, exit status
KILLED = re.compile(rb"\d+,\d+,(\d+),.*Killed process (\d+) ")  # priority, number, microseconds since the start
INITIAL_NAMESPACE = 0xEFFFFFFC  # linux/proc_ns.h
EXIT_CODE_FIELD, STATE_FIELD, START_FIELD = 51, 2, 21  # of /proc/PID/stat, from 0


@dataclass(frozen=True)
class Process:
    """One process, told apart from later ones with the same number."""

    pid: int  # its number
    started: int  # clock ticks after the start of the host; 0 where that cannot be seen

    @classmethod
    def current(cls) -> Process:
        """Local: this process."""
        fields = _stat(os.getpid())
        return cls(os.getpid(), int(fields[START_FIELD]) if fields else 0)

    def state(self) -> str | None:
        """Local: a letter of STATES; None when it is gone, or cannot be seen."""
        fields = self._fields()
        return fields[STATE_FIELD] if fields else None

    def open(self) -> int | None:
        """Local: a descriptor that becomes readable when the process ends; to be closed by the caller."""
        if not hasattr(os, "pidfd_open") or not self._fields():
            return None
        try:
            return os.pidfd_open(self.pid)
        except OSError:
            return None

    def exit_status(self, descriptor: int | None = None) -> int | None:
        """Local: how the process ended, as of `os.waitpid`; None while it lives, or when that is not known.

        It is known until the parent has taken notice, which for a launcher is a few milliseconds. With a
        descriptor it stays known (Linux 6.15 and later).
        """
        fields = self._fields()
        if fields and len(fields) > EXIT_CODE_FIELD:
            # The kernel writes it before it closes the files of the process, so it is there when a connection closes.
            status = int(fields[EXIT_CODE_FIELD])
            return status if status or fields[STATE_FIELD] in "ZX" else None
        return None if descriptor is None else exit_status_of(descriptor)

    def kill(self) -> None:
        """Local: end the process, if it is there."""
        if self._fields():
            try:
                os.kill(self.pid, signal.SIGKILL)
            except OSError:
                return  # gone meanwhile, or not ours

    def _fields(self) -> list[str] | None:
        fields = _stat(self.pid)
        return fields if fields and int(fields[START_FIELD]) == self.started else None


def resident_bytes() -> int | None:
    """Local: memory that this process occupies now."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Local: how many processes the kernel has killed for want of memory, of this host and of this control group."""
    counts = [_counter(root / "proc/vmstat", "oom_kill")]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        base = root / "sys/fs/cgroup"
        if controllers == "":
            files = [base / group.lstrip("/") / "memory.events", base / "memory.events"]
        elif "memory" in controllers.split(","):
            files = [base / "memory" / group.lstrip("/") / "memory.oom_control", base / "memory/memory.oom_control"]
        else:
            continue
        counts.append(next((count for count in (_counter(file, "oom_kill") for file in files) if count), 0))
    return sum(counts)


def killed_for_memory(process: Process, log: Path = Path("/dev/kmsg")) -> bool | None:
    """Local: whether the kernel has ended a process for want of memory, as its log says; None where that is not known.

    Args:
        process: that has ended.
        log: of the kernel, which few may read, and which counts the processes of a container otherwise.
    """
    since = (process.started / os.sysconf("SC_CLK_TCK") - 1.0) * 1e6
    try:
        if Path("/proc/self/ns/pid").stat().st_ino != INITIAL_NAMESPACE:
            return None
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = [KILLED.match(record) for record in _records(descriptor)]
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return any(match and int(match[1]) >= since and int(match[2]) == process.pid for match in found)


def signal_name(number: int) -> str:
    """Local: such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(status: int) -> tuple[str, int, str | None]:
    """Local: words, the exit code a shell would show, and the signal if there was one."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was killed by {signal_name(number)}", BY_SIGNAL + number, signal_name(number)
    return f"ended with exit code {os.WEXITSTATUS(status)}", os.WEXITSTATUS(status), None


def bytes_text(nbytes: float | None) -> str:
    """Local: such as 1.5 GiB."""
    if nbytes is None:
        return "unknown"
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def exit_status_of(descriptor: int) -> int | None:
    """Local: how the process of a `pidfd` ended, as of `os.waitpid`; None while it lives, and before Linux 6.15."""
    info = struct.pack(PIDFD_INFO, PIDFD_INFO_EXIT, *[0] * 13)  # linux/pidfd.h
    request = (3 << 30) | (len(info) << 16) | (0xFF << 8) | 11  # PIDFD_GET_INFO
    try:
        mask, *_, status = struct.unpack(PIDFD_INFO, fcntl.ioctl(descriptor, request, info))
    except OSError:
        return None
    return status if mask & PIDFD_INFO_EXIT else None


def _records(descriptor: int) -> Iterator[bytes]:
    """Local: those of the kernel's log, one at each read."""
    while True:
        try:
            record = os.read(descriptor, 1 << 13)
        except BrokenPipeError:
            continue  # it was overwritten meanwhile
        except BlockingIOError:
            return
        if not record:
            return
        yield from record.splitlines()


def _stat(pid: int) -> list[str] | None:
    try:
        # The second field is the name of the program in brackets, which may hold blanks and brackets itself.
        head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    return [head.partition(" ")[0], head, *tail.split()]


def _counter(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
