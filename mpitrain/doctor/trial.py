"""A small MPI job over all hosts: the proof that one starts, and its speed against that of the link."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpitrain.doctor.facts import Facts
from mpitrain.doctor.finding import Finding
from mpitrain.runtime.counted import counted
from mpitrain.runtime.launcher import without_rank

# What the program of the job, `probe`, prints: results on rank 0, and on each how far it has come.
MARK = "mpitrain probe: "
BEGUN, STARTED = "the program has begun", "MPI has started"
# Of its rate a link should give this much; MPI over TCP on an idle network gives nine tenths.
LEAST_SHARE = 0.5
# Where TCP is faster than this, cores are what limits MPI.
FAST_BITS_PER_SECOND = 1e9
SLOW_BITS_PER_SECOND = 100e6
SLOW_LATENCY_SECONDS = 5e-3
# The exchange runs in TensorFlow's threads while the main thread goes on.
THREAD_LEVELS = {"multiple": "green", "serialized": "yellow"}
# Of what a launcher says at length, the lines that tell why; the first come from where it began.
TELLING = re.compile("error|fail|unable|cannot|could not|refused|denied|not found|unreachable|timed out", re.IGNORECASE)
SHOWN_LINES, SHOWN_LETTERS = 3, 400


@dataclass(frozen=True)
class Pair:
    """What was measured between two hosts."""

    source: str
    target: str
    latency_seconds: float
    bits_per_second: float


@dataclass(frozen=True)
class Trial:
    """How the job went."""

    seconds: float | None = None  # how long it was waited for, if it did not end
    code: int | None = None  # its exit code, if it ended
    words: str = ""  # the end of what it said
    ranks: int = 0  # how many found each other
    hosts: int = 0  # on how many hosts
    thread_level: str = ""  # that MPI gave
    pairs: tuple[Pair, ...] = ()  # measurements


def run(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> Trial:
    """Local: start the job, and end it if it takes too long."""
    try:
        process = subprocess.Popen(
            command,
            env=without_rank(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Trial(code=127, words=str(error))
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        output = _end(process)
        return Trial(seconds=seconds, words=output)
    return read(process.returncode, output)


def read(code: int, output: str) -> Trial:
    """A job that has ended, by its exit code and what it printed."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if not lines:
        return Trial(code=code, words=output)
    told = json.loads(lines[-1][len(MARK) :])
    pairs = tuple(Pair(**pair) for pair in told["pairs"])
    return Trial(None, code, output, told["ranks"], told["hosts"], told["thread_level"], pairs)


def check(trial: Trial, names: Sequence[str]) -> Iterator[Finding]:
    """Whether the job ran, and the level of threads."""
    hosts = tuple(names)
    if trial.seconds is not None or trial.code or not trial.ranks:
        yield Finding("MPI job", hosts, "red", *_failed(trial, names))
        return
    where = f"{counted(trial.ranks, 'rank')} on {counted(trial.hosts, 'host')} found each other"
    yield Finding("MPI job", hosts, "green", where)
    colour = THREAD_LEVELS.get(trial.thread_level, "red")
    sentence = f"MPI gives the level {trial.thread_level}"
    remedy = "" if colour == "green" else "an MPI that is built with threads (MPI_THREAD_MULTIPLE)"
    yield Finding("threads", hosts, colour, sentence, remedy)  # type: ignore[arg-type]


def slowest(trial: Trial) -> Pair | None:
    """The pair with the least bandwidth: a ring is as fast as its slowest link."""
    return min(trial.pairs, key=lambda pair: pair.bits_per_second, default=None)


def link_rate(facts: Mapping[str, Facts]) -> float | None:
    """Bits per second of the slowest host's fastest interface; None where one of them is not known."""
    rates = []
    for host in facts.values():
        known = [interface.speed_mbit for interface in host.interfaces if interface.leads_out]
        if not known or None in known:
            return None
        rates.append(max(speed for speed in known if speed is not None))
    return min(rates) * 1e6


def check_link(pair: Pair, rate: float | None, tcp: float | None) -> Finding:
    """What MPI gets, against what the link should give.

    Args:
        pair: measured by MPI.
        rate: bits per second by the hosts' interfaces, where these are known.
        tcp: bits per second that TCP alone gets on the same way, where that was measured.
    """
    latency = f"{pair.latency_seconds * 1e6:.0f} us"
    sentence = f"slowest: {pair.source} to {pair.target}, {_bits(pair.bits_per_second)}, latency {latency}"
    sentence += f"; the link has {_bits(rate)}" if rate is not None else ""
    sentence += f"; TCP alone gets {_bits(tcp)}" if tcp is not None else ""
    ends = (pair.source, pair.target)
    least = [SLOW_BITS_PER_SECOND]
    least += [LEAST_SHARE * rate] if rate is not None else []
    least += [LEAST_SHARE * min(tcp, FAST_BITS_PER_SECOND)] if tcp is not None else []
    if pair.bits_per_second < max(least):
        remedy = f"look for other traffic and errors: ip -s link; without MPI: iperf3 -c {pair.target}"
        return Finding("link", ends, "yellow", f"slow: {sentence}", remedy)
    if pair.latency_seconds > SLOW_LATENCY_SECONDS:
        remedy = f"hosts that are nearer to each other: ping -c 10 {pair.target}"
        return Finding("link", ends, "yellow", f"far: {sentence}", remedy)
    return Finding("link", ends, "green", sentence)


def _bits(rate: float) -> str:
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def _failed(trial: Trial, names: Sequence[str]) -> tuple[str, str]:
    progress = (BEGUN, STARTED)
    lines = ["".join(filter(str.isprintable, line)).strip() for line in trial.words.splitlines()]
    said = [line for line in lines if line.strip("-*=") and not line.endswith(progress)]
    said = [line for line in dict.fromkeys(said) if TELLING.search(line)][:SHOWN_LINES] or said[-SHOWN_LINES:]
    words = f"; it said: {' / '.join(said)[:SHOWN_LETTERS]}" if said else ""
    listed = ["-H", ",".join(f"{name}:1" for name in names), "--map-by", "node"] if len(names) > 1 else []
    remedy = f"see for yourself: {' '.join(['mpitrain run -np', str(max(2, len(names))), *listed, 'hostname'])}"
    if trial.seconds is None:
        return f"the trial job failed with exit code {trial.code}{words}", remedy
    begun, started = ({line.partition(":")[0] for line in lines if line.endswith(what)} for what in progress)
    if started:
        late = [name for name in names if name not in started]
        stage = "after MPI had started" + (
            f" on {', '.join(sorted(started))}, but not on {', '.join(late)}" if late else ""
        )
    elif begun:
        late = [name for name in names if name not in begun]
        stage = "while MPI was starting" + (f" (not begun on {', '.join(late)})" if late else "")
    else:
        stage = "before any rank had begun: mpirun does not get through to its daemons"
    sentence = f"the trial job hung {stage}, and was ended after {trial.seconds:.0f} s{words}"
    return sentence, f"a firewall, or a wrong interface; {remedy}"


def _end(process: subprocess.Popen[str]) -> str:
    """Local: first kindly, for the launcher to end what it has started on other hosts."""
    for number, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=seconds)[0]
    return ""
