"""What came of a job: the exit code, and what is said about it."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

from mpitrain.launch.daemonless.places import nodes_of
from mpitrain.launch.request import Request
from mpitrain.launch.ssh_program import NO_CONNECTION
from mpitrain.launch.supervisor import Outcome
from mpitrain.runtime.counted import counted
from mpitrain.runtime.exit_codes import BY_SIGNAL

# What Open MPI's launcher says when it misses the daemon of a host.
LOST_DAEMON = re.compile(r"Remote daemon\s*:\s*\[[^\]]*\] on node ([\w.-]+)")
LOST_BY_SSH = re.compile(r"(?:Connection to|Timeout, server) ([\w.-]+) (?:closed by remote host|not responding)")
EXITED = re.compile(r"^srun: error: \S+ tasks? \S+ Exited with exit code (\d+)$", re.MULTILINE)
NO_LISTENER = b"The PMIx server's listener thread failed to start"  # Open MPI 5
NOT_FOUND = (126, 127)  # of a shell: the program is not there, or is none


def judge(outcome: Outcome, request: Request, start_timeout_seconds: float) -> tuple[int, list[str]]:
    """The exit code of the job, and sentences for the user.

    The launcher's exit code stands if it tells of a failure; not so where rank 0 has told that it ends with 0, and all
    ranks had come to their end: what happens to them afterwards is no matter. If it is 0, a job of several ranks has
    succeeded only if rank 0 said so, where ranks have told anything at all (programs without mpitrain tell nothing).
    """
    said = _hosts(outcome)
    if outcome.timed_out:
        said.append(_late(outcome, request, start_timeout_seconds))
        return outcome.code or 1, said
    if outcome.signals and outcome.code == 0 and not outcome.finished:
        return BY_SIGNAL + outcome.signals[-1], said
    hosts = set(outcome.listener.ranks("begun").values()) | {host.name for host in request.hosts}
    several = len(hosts) > 1 or (outcome.met and request.ranks > 1)
    if outcome.code == 0 and not outcome.finished and (said or (outcome.listener.marks and several)):
        why = "A host or a connection may have been lost" if len(hosts) > 1 else "A rank may have ended without a word"
        if outcome.first is not None and outcome.first.how:
            why = f"Rank {outcome.first.rank} on {os.uname().nodename} {outcome.first.how}"
        said.append(
            "the job has failed, although its launcher ended with exit code 0: rank 0 did not come to its end. "
            f"{why}; what was printed last, and the hosts' logs, may tell"
        )
        return 1, said
    if outcome.code != 0 and not outcome.signals and outcome.succeeded:
        said.append(f"the job is done; its launcher ended with exit code {outcome.code} because of what came after")
        return 0, said
    is_told = said or outcome.finished or b"\nmpitrain: rank" in b"\n" + outcome.tail
    if outcome.code != 0 and outcome.silent and not is_told:
        said.append(_silent(outcome))
    return _of_the_first(outcome), said


def _silent(outcome: Outcome) -> str:
    first, then = outcome.first, "then ended the others before they could tell why"
    if first is not None and first.how:
        place = f"rank {first.rank} on {os.uname().nodename}"
        return f"{place} {first.how}, and the launcher, whose exit code is {outcome.code}, {then}"
    text = f"a rank ended without a word; the launcher, whose exit code is {outcome.code}, {then}"
    if first is None:
        return text
    return f"{text}. Rank {first.rank} on {os.uname().nodename} was gone first, but need not be the one"


def _of_the_first(outcome: Outcome) -> int:
    """The exit code of the task that failed first: srun's own is the highest, that of those it killed for it."""
    first = EXITED.search(outcome.tail.decode(errors="replace"))
    return int(first[1]) if first and outcome.code > 128 and not outcome.signals else outcome.code


def lost_hosts(outcome: Outcome) -> list[str]:
    """The hosts to which there was no connection, or no longer, as far as ssh and the launcher told."""
    text = outcome.tail.decode(errors="replace")
    failed = [host for host, code in outcome.ssh_codes.items() if code == NO_CONNECTION]
    # A launcher that ends a job ends its ssh too, which then gives the same exit code.
    named = [host for host in failed if not outcome.met or host in outcome.lost or host in LOST_BY_SSH.findall(text)]
    return list(dict.fromkeys(named + LOST_DAEMON.findall(text)))


def _hosts(outcome: Outcome) -> list[str]:
    if outcome.finished:
        return []
    if outcome.met:
        return [f"the connection to {host} was lost while the job ran" for host in lost_hosts(outcome)]
    said = [
        f"the connection to {host} was lost before all ranks had met"
        if outcome.reached(host)
        else f"{host} cannot be reached by ssh, which says why above; try: ssh -o BatchMode=yes {host} true "
        "(it must neither fail nor ask for anything)"
        for host in lost_hosts(outcome)
    ]
    for host, code in outcome.ssh_codes.items():
        if code in NOT_FOUND:
            said.append(
                f"the launcher was not found on {host} (exit code {code}): MPI and Python must be installed there in "
                "the same place as here"
            )
    if NO_LISTENER in outcome.tail:
        said.append(
            "no rank has begun: Open MPI keeps files of all its jobs in one directory of TMPDIR, and jobs of this host "
            "that begin and end at the same moment can take it from each other. Start it again, or give each its TMPDIR"
        )
    return said


def _late(outcome: Outcome, request: Request, seconds: float) -> str:
    begun = outcome.listener.ranks("begun")
    text = f"the {counted(request.ranks, 'rank')} did not meet within {seconds:g} s (--start-timeout)"
    if not begun:
        return f"{text}: none has begun. Where is the launcher waiting? See with --verbose, and mpitrain doctor"
    where = ", ".join(f"{host} {count}" for host, count in Counter(begun.values()).items())
    absent = [rank for rank in range(request.ranks) if rank not in begun]
    if absent and -1 not in begun:
        return (
            f"{text}: begun have {len(begun)} ({where}), but not rank {_some(absent)}. Is Python slow there, or stuck?"
        )
    nodes = nodes_of(request.ranks, request.hosts, request.map_by) if request.hosts else []
    named = {request.hosts[node].name for node in nodes}
    if len(set(begun.values())) < len(named) and -1 not in begun:
        return (
            f"{text}: all have begun, on fewer hosts ({where}) than were named ({_some(sorted(named))}). Where two "
            "names are of one host, name it once, with all its slots: some MPIs do not connect the ranks of both"
        )
    return (
        f"{text}: all have begun ({where}), but MPI does not connect them. Hosts may have interfaces that lead nowhere "
        "(docker0, virbr0: choose with --network-interfaces), or a firewall between them; see mpitrain doctor"
    )


def _some(things: Sequence[object]) -> str:
    return ", ".join(map(str, things[:8])) + ", ..." * (len(things) > 8)
