"""The whole examination: ask every host, try the ways between them, start a small job; all in bounded time."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpitrain.doctor import agent as agent_
from mpitrain.doctor import facts as facts_
from mpitrain.doctor import job as job_
from mpitrain.doctor import machine, network, software, ssh_faults, trial
from mpitrain.doctor.connection import Agent, all_at_once, start
from mpitrain.doctor.facts import Clock, Facts
from mpitrain.doctor.finding import Finding, merged
from mpitrain.doctor.job import Job
from mpitrain.doctor.reach import WAY_SECONDS, Reach
from mpitrain.doctor.ssh_faults import Unanswered
from mpitrain.errors import LauncherError
from mpitrain.launch.agent import Agent as SshProgram
from mpitrain.launch.commands import build
from mpitrain.launch.dialect import ASK_LIBRARY, Mpi, find_mpirun
from mpitrain.launch.request import Request, forwarded
from mpitrain.launch.ssh import Ssh, from_environment

# With those of `reach` less than a minute together, whatever is broken.
CONNECT_SECONDS = 5  # ssh's own limit
ASK_SECONDS = 20.0
TRIAL_SECONDS = 18.0
# With one of these red, a trial job would only say the same in worse words, later.
NEEDED = ("ssh", "Python", "numpy", "mpi4py", "mpitrain", "MPI", "user", "network", "firewall", "interfaces")
OWN = ""  # this machine, where no host is named so


@dataclass(frozen=True)
class Visit:
    """A host that answers."""

    agent: Agent
    facts: Facts


def examine(job: Job, tell: Callable[[str], None]) -> tuple[Finding, ...]:
    """Local: everything about a job that is not started yet.

    Args:
        job: what would be started.
        tell: is told what is being done.

    Returns:
        Findings, in the order in which they are to be read.
    """
    ssh = from_environment(job.environ, connect_timeout_seconds=CONNECT_SECONDS)
    with contextlib.closing(_Examination(job, ssh, tell)) as examination:
        return merged(examination.findings())


def is_here(name: str, own_name: str, addresses: Collection[str]) -> bool:
    """Local: whether a name means this machine. May wait for a name server.

    Args:
        name: of a host.
        own_name: what this machine calls itself.
        addresses: of this machine.
    """
    if name in ("localhost", own_name, own_name.partition(".")[0]):
        return True
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False  # ssh may know it all the same
    return not found.isdisjoint(addresses)


@dataclass
class _Examination:
    job: Job
    ssh: Ssh
    tell: Callable[[str], None]
    agents: list[Agent] = field(default_factory=list)

    @property
    def mpirun(self) -> list[str]:
        """The path of the mpirun that `mpitrain run` would start, if there is one."""
        try:
            return [find_mpirun(self.job.environ)]
        except LauncherError:
            return []

    def findings(self) -> Iterator[Finding]:
        names = [host.name for host in self.job.hosts]
        self.tell(f"asking {_count(names)} (at most {ASK_SECONDS:.0f} s)")
        visits, failures, here = self._visits(names)
        yield from failures
        if here is None:
            return
        others = tuple(name for name in visits if visits[name] is not visits[here])
        if others:
            yield Finding(ssh_faults.CHECK, others, "green", "answers without asking anything")
        facts = {name: visit.facts for name, visit in visits.items()}
        launcher = facts[here].own_launcher
        mpi = launcher.mpi if launcher is not None else None
        found = [*software.check(here, facts), *job_.check(self.job, mpi, facts), *machine.check(self.job, facts)]
        reach = Reach({name: visit.agent for name, visit in visits.items()}, facts)
        if others:
            self.tell(f"trying connections between {_count(facts)} (at most {WAY_SECONDS:.0f} s)")
            found += self._ways(reach, facts, mpi)
        yield from found
        red = dict.fromkeys(finding.check for finding in (*failures, *found) if finding.colour == "red")
        hindrances = [check for check in red if check in NEEDED]
        if launcher is None or mpi is None or hindrances:
            yield Finding("MPI job", tuple(names), "yellow", f"not tried: first mend {', '.join(hindrances) or 'MPI'}")
        else:
            yield from self._trial(mpi, launcher.path, reach, {name: facts[name] for name in names})

    def close(self) -> None:
        """Local: end all agents."""
        agents = {str(number): agent for number, agent in enumerate(self.agents)}
        all_at_once(lambda number: agents[number].close(), agents, 3)

    def _visits(self, names: Sequence[str]) -> tuple[dict[str, Visit], list[Finding], str | None]:
        """The hosts that answer, what is wrong with the others, and the name of the host this runs on."""
        own_name = os.uname().nodename
        addresses = {interface["address"] for interface in agent_.interfaces()}

        def visit(name: str) -> Visit | None:
            if name == OWN:
                return self._visit(None)
            return None if is_here(name, own_name, addresses) else self._visit(name)

        asked = all_at_once(visit, (OWN, *names), ASK_SECONDS + 1)
        own = asked.pop(OWN)
        if not isinstance(own, Visit):
            words = own.words.strip() if isinstance(own, Unanswered) else ""
            return {}, [Finding("this host", (), "red", f"cannot be examined: {words or 'it takes too long'}")], None
        failures = [ssh_faults.diagnose(name, found) for name, found in asked.items() if isinstance(found, Unanswered)]
        visits = {name: found or own for name, found in asked.items() if not isinstance(found, Unanswered)}
        here = next((name for name, found in visits.items() if found is own), own_name)
        return {here: own, **visits}, failures, here

    def _visit(self, host: str | None) -> Visit:
        agent = start(host, self.ssh, self.job.environ)
        self.agents.append(agent)
        paths = [str(Path.cwd()), *self.mpirun]
        told = agent.ask("facts", ASK_SECONDS, paths=paths, ask_library=ASK_LIBRARY)
        clock = Clock(0.0, 0.0) if host is None else agent.clock()
        return Visit(agent, replace(facts_.read(told), clock=clock))

    def _ways(self, reach: Reach, facts: Mapping[str, Facts], mpi: Mpi | None) -> Iterator[Finding]:
        attempts, silent = reach.try_all(network.port_ranges(self.job.environ, mpi))
        if silent:
            yield Finding("network", tuple(silent), "red", "stopped answering while it was examined")
        answering = {name: host for name, host in facts.items() if name not in silent}
        yield from network.check(answering, attempts, self.job.environ, mpi)

    def _trial(self, mpi: Mpi, mpirun: str, reach: Reach, facts: Mapping[str, Facts]) -> Iterator[Finding]:
        """One rank on each host, two on a single one, started as `mpitrain run` would."""
        self.tell(f"starting a small MPI job on {_count(facts)} (at most {TRIAL_SECONDS:.0f} s)")
        hosts = tuple(self.job.hosts)
        request = Request(
            (sys.executable, "-m", "mpitrain.doctor.probe"),
            max(2, len(hosts)),
            hosts,
            map_by="node",
            oversubscribe=len(hosts) == 1,
            environment=forwarded(self.job.environ, ()),
        )
        with SshProgram(self.ssh) as program:
            command = build(request, mpi, mpirun, str(program.path))
            outcome = trial.run(command.argv, command.environ(self.job.environ), TRIAL_SECONDS)
        yield from trial.check(outcome, tuple(facts))
        pair = trial.slowest(outcome)
        if pair is not None and len(facts) > 1:
            tcp = reach.tcp_bits_per_second(pair.source, pair.target)
            yield trial.check_link(pair, trial.link_rate(facts), tcp)


def _count(hosts: Collection[str]) -> str:
    return f"{len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}"
