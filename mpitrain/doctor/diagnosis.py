"""The whole examination: ask every host, try the ways between them, start a small job; all in bounded time."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpitrain.doctor import agent as agent_
from mpitrain.doctor import facts as facts_
from mpitrain.doctor import job as job_
from mpitrain.doctor import machine, network, software, ssh_faults, trial
from mpitrain.doctor.connection import Agent, ask_all, by_srun, start
from mpitrain.doctor.facts import Clock, Facts
from mpitrain.doctor.finding import Finding, merged
from mpitrain.doctor.job import PlannedJob
from mpitrain.doctor.reach import WAY_SECONDS, Reach
from mpitrain.doctor.ssh_faults import Unanswered
from mpitrain.errors import LauncherError
from mpitrain.launch.dialect import ASK_LIBRARY, Mpi, find_mpirun, launcher_mpi
from mpitrain.launch.job import LaunchJob as StartedJob
from mpitrain.launch.job import Srun, choose_srun
from mpitrain.launch.request import Request, forwarded
from mpitrain.launch.ssh import Ssh, from_environment
from mpitrain.launch.ssh_program import SshProgram as SshProgram
from mpitrain.runtime.counted import counted

# All is over within a minute, whatever is broken: the trial job has what asking and connecting have left.
WHOLE_SECONDS = 55.0
CONNECT_SECONDS = 5  # ssh's own limit
ASK_SECONDS = 22.0
LEAST_TRIAL_SECONDS = 15.0
# With one of these red, a trial job would only say the same in worse words, later.
NEEDED = (
    "ssh",
    "srun",
    "Python",
    "numpy",
    "mpi4py",
    "mpitrain",
    "MPI",
    "paths",
    "user",
    "network",
    "firewall",
    "interfaces",
)
OWN = ""  # this machine, where no host is named so


@dataclass(frozen=True)
class Visit:
    """A host that answers."""

    agent: Agent
    facts: Facts


def examine(job: PlannedJob, tell: Callable[[str], None]) -> tuple[Finding, ...]:
    """Local: everything about a job that is not started yet.

    Returns:
        Findings, in the order in which they are to be read.

    Raises:
        UsageError: the program that takes ssh's place is none.
    """
    ssh = from_environment(job.environ, connect_timeout_seconds=CONNECT_SECONDS)
    mpirun, mpi = _launcher(job.environ)
    srun = choose_srun("auto", job.allocation, mpi, job.environ) if mpi is not None else None
    with contextlib.closing(_Examination(job, ssh, tell, mpirun, mpi, srun)) as examination:
        return merged(examination.findings())


def _launcher(environ: Mapping[str, str]) -> tuple[str | None, Mpi | None]:
    """Local: the mpirun that `mpitrain run` would start, and whose it is, as far as they are known."""
    try:
        path = find_mpirun(environ)
    except LauncherError:
        return None, None
    try:
        return path, launcher_mpi(path, environ)
    except LauncherError:
        return path, None


def is_here(name: str, own_name: str, addresses: Collection[str]) -> bool:
    """Local: whether a name means this machine. May wait for a name server."""
    if name in ("localhost", own_name, own_name.partition(".")[0]):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False  # ssh may know it all the same
    # Distributions give a machine's own name an address such as 127.0.1.1, which no interface has.
    return any(address in addresses or address.startswith("127.") for address in found)


@dataclass
class _Examination:
    job: PlannedJob
    ssh: Ssh
    tell: Callable[[str], None]
    mpirun: str | None
    mpi: Mpi | None
    srun: Srun | None
    agents: list[Agent] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def findings(self) -> Iterator[Finding]:
        names = [host.name for host in self.job.hosts]
        self.tell(f"asking {_count(names)} (at most {ASK_SECONDS:.0f} s)")
        visits, failures, here = self._visits(names)
        yield from failures
        if here is None:
            return
        others = tuple(name for name in visits if visits[name] is not visits[here])
        if others:
            yield Finding("srun" if self.srun else "ssh", others, "green", "answers without asking anything")
        facts = {name: visit.facts for name, visit in visits.items()}
        found = [
            *software.check(here, facts),
            *job_.check(self.job, self.mpi, facts, self.srun is not None),
            *machine.check(self.job, facts),
        ]
        reach = Reach({name: visit.agent for name, visit in visits.items()}, facts)
        if others:
            self.tell(f"trying connections between {_count(facts)} (at most {WAY_SECONDS:.0f} s)")
            found += self._ways(reach, facts)
        yield from found
        red = dict.fromkeys(finding.check for finding in (*failures, *found) if finding.colour == "red")
        hindrances = [check for check in red if check in NEEDED]
        if self.mpirun is None or self.mpi is None or hindrances:
            yield Finding("MPI job", tuple(names), "yellow", f"not tried: first mend {', '.join(hindrances) or 'MPI'}")
        else:
            yield from self._trial(self.mpi, self.mpirun, reach, {name: facts[name] for name in names})

    def close(self) -> None:
        """Local: end all agents."""
        agents = {str(number): agent for number, agent in enumerate(self.agents)}
        ask_all(lambda number: agents[number].close(), agents, 3)

    def _visits(self, names: Sequence[str]) -> tuple[dict[str, Visit], list[Finding], str | None]:
        """The hosts that answer, what is wrong with the others, and the name of the host this runs on."""
        own_name = os.uname().nodename
        addresses = {interface["address"] for interface in agent_.interfaces()}

        def visit(name: str) -> Visit | None:
            if name == OWN:
                return self._visit(None)
            return None if is_here(name, own_name, addresses) else self._visit(name)

        asked = ask_all(visit, (OWN, *names), ASK_SECONDS + 1)
        own = asked.pop(OWN)
        if not isinstance(own, Visit):
            words = own.words.strip() if isinstance(own, Unanswered) else ""
            return {}, [Finding("this host", (), "red", f"cannot be examined: {words or 'it takes too long'}")], None
        diagnose = ssh_faults.diagnose_srun if self.srun else ssh_faults.diagnose
        failures = [diagnose(name, found) for name, found in asked.items() if isinstance(found, Unanswered)]
        visits = {name: found or own for name, found in asked.items() if not isinstance(found, Unanswered)}
        here = next((name for name, found in visits.items() if found is own), own_name)
        return {here: own, **visits}, failures, here

    def _visit(self, host: str | None) -> Visit:
        agent = start(host, by_srun(self.srun.path) if self.srun else self.ssh.command, self.job.environ)
        self.agents.append(agent)
        paths = [str(Path.cwd()), *([self.mpirun] if self.mpirun else [])]
        told = agent.ask("facts", ASK_SECONDS, paths=paths, ask_library=ASK_LIBRARY)
        clock = Clock(0.0, 0.0) if host is None else agent.clock()
        return Visit(agent, replace(facts_.read(told), clock=clock))

    def _ways(self, reach: Reach, facts: Mapping[str, Facts]) -> Iterator[Finding]:
        attempts, silent = reach.try_all(network.port_ranges(self.job.environ, self.mpi))
        if silent:
            yield Finding("network", tuple(silent), "red", "stopped answering while it was examined")
        answering = {name: host for name, host in facts.items() if name not in silent}
        yield from network.check(answering, attempts, self.job.environ, self.mpi)

    def _trial(self, mpi: Mpi, mpirun: str, reach: Reach, facts: Mapping[str, Facts]) -> Iterator[Finding]:
        """One rank on each host, two on a single one, started as `mpitrain run` would."""
        seconds = max(LEAST_TRIAL_SECONDS, self.began + WHOLE_SECONDS - time.monotonic())
        self.tell(f"starting a small MPI job on {_count(facts)} (at most {seconds:.0f} s)")
        hosts = tuple(self.job.hosts)
        request = Request(
            (sys.executable, "-m", "mpitrain.doctor.probe"),
            max(2, len(hosts)),
            hosts,
            map_by="node",
            oversubscribe=len(hosts) == 1,
            environment=forwarded(self.job.environ, ()),
        )
        started = StartedJob(request, mpi, mpirun, self.job.allocation, self.srun)
        with SshProgram(self.ssh) as program:
            command = started.command(
                self.job.environ, str(program.path) if started.uses_ssh(self.job.environ) else None
            )
            outcome = trial.run(command.argv, command.environ(self.job.environ), seconds)
        yield from trial.check(outcome, tuple(facts))
        pair = trial.slowest(outcome)
        if pair is not None and len(facts) > 1:
            tcp = reach.tcp_bits_per_second(pair.source, pair.target)
            yield trial.check_link(pair, trial.link_rate(facts), tcp)


def _count(hosts: Collection[str]) -> str:
    return counted(len(hosts), "host")
