"""`mpitrain doctor`: what would stop a job on these hosts, in one table, with what mends it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mpitrain.cli.job_options import JobOptions
from mpitrain.cli.parser import Parser
from mpitrain.config import build, options
from mpitrain.doctor.diagnosis import examine
from mpitrain.doctor.finding import WORST_FIRST, Finding, worst
from mpitrain.doctor.job import PlannedJob
from mpitrain.errors import LauncherError
from mpitrain.launch import allocation
from mpitrain.runtime import launcher
from mpitrain.runtime.counted import counted
from mpitrain.runtime.hostfile import Host, same_hosts
from mpitrain.runtime.threads import physical_cores

NAMED_HOSTS = 4


def add_parser(subparsers: Any) -> None:
    """Local: add `doctor` to the command line."""
    parser: Parser = subparsers.add_parser("doctor", prog="mpitrain doctor", description=__doc__)
    parser.add_options(options(JobOptions))
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Local: examine, and print.

    Returns:
        0 when nothing is red, else 1.

    Raises:
        UsageError: the hosts cannot be read.
        LauncherError: this is a rank of a job.
    """
    found = launcher.detect(os.environ)
    if found is not None and (found.size or 1) > 1:
        raise LauncherError(f"doctor looks at hosts before a job is started: run it alone, without {found.name}")
    job = _job(build(JobOptions, vars(arguments)))
    began = time.monotonic()
    findings = examine(job, _tell)
    seconds = time.monotonic() - began
    if arguments.json:
        told = {"colour": worst(findings), "seconds": round(seconds, 1), "findings": [asdict(one) for one in findings]}
        print(json.dumps(told, indent=1))
    else:
        _print(findings, [host.name for host in job.hosts], seconds)
    return 1 if worst(findings) == "red" else 0


def _job(chosen: JobOptions) -> PlannedJob:
    """Local: on the hosts given, else those of the batch job, else this one with a slot for each core."""
    batch = allocation.find(os.environ)
    hosts = chosen.named_hosts() or (batch.hosts if batch else (Host("localhost", physical_cores()),))
    asked = batch.ranks if batch and hosts == batch.hosts else None
    given = [host.name for host in batch.hosts] if batch else []
    within = batch if all(same_hosts(host.name, given) for host in hosts) else None
    return PlannedJob(hosts, chosen.num_proc or asked or sum(host.slots for host in hosts), os.environ, within)


def _tell(what: str) -> None:
    sys.stderr.write(f"mpitrain doctor: {what}\n")
    sys.stderr.flush()


def _print(findings: Sequence[Finding], names: Sequence[str], seconds: float) -> None:
    """A table on a terminal, else lines that grep can use."""
    if sys.stdout.isatty():
        _print_table(findings, names)
    else:
        for one in findings:
            mend = f"; mend: {one.remedy}" if one.remedy else ""
            print(f"{one.colour:<6} {one.check:<14} {_where(one, names)}: {one.sentence}{mend}")
    counts = [f"{sum(one.colour == colour for one in findings)} {colour}" for colour in WORST_FIRST]
    print(f"{', '.join(counts)}; {counted(len(names), 'host')}, {seconds:.1f} s")


def _print_table(findings: Sequence[Finding], names: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "check", "hosts", "found", show_edge=False, pad_edge=False)
    for one in findings:
        words = Text(one.sentence)
        if one.remedy:
            words.append(f"\nmend: {one.remedy}", style="bold")
        table.add_row(Text(one.colour, style=one.colour), one.check, Text(_where(one, names)), words)
    Console(highlight=False).print(table)


def _where(finding: Finding, names: Sequence[str]) -> str:
    hosts = finding.hosts
    if len(hosts) > 1 and set(hosts) >= set(names):
        return f"all {len(hosts)}"
    more = f" and {len(hosts) - NAMED_HOSTS} more" if len(hosts) > NAMED_HOSTS else ""
    return ", ".join(hosts[:NAMED_HOSTS]) + more
