"""The whole examination: ask every host, try the ways between them, start a small job; all in bounded time."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpitrain.doctor import facts as facts_
from mpitrain.doctor import job as job_
from mpitrain.doctor import machine, network, software, ssh_faults, trial
from mpitrain.doctor.connection import Agent, all_at_once, start
from mpitrain.doctor.facts import Clock, Facts
from mpitrain.doctor.finding import Finding, merged
from mpitrain.doctor.job import Job
from mpitrain.doctor.ssh_faults import Unanswered
from mpitrain.launch.agent import Agent as SshProgram
from mpitrain.launch.commands import build
from mpitrain.launch.dialect import ASK_LIBRARY, Mpi
from mpitrain.launch.request import Request, forwarded
from mpitrain.launch.ssh import Ssh, from_environment
from mpitrain.runtime.hostfile import Host

# Together less than a minute, whatever is broken.
CONNECT_SECONDS = 5  # ssh's own limit
ASK_SECONDS = 22.0
LISTEN_SECONDS = 3.0
WAY_SECONDS = 3.0
CONNECT_ALL_SECONDS = 8.0
TRIAL_SECONDS = 20.0
# With one of these red, a trial job would only say the same in worse words, later.
NEEDED = ("ssh", "Python", "numpy", "mpi4py", "mpitrain", "MPI", "user", "network", "firewall", "interfaces")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Visit:
    """A host that answers."""

    agent: Agent
    facts: Facts


@dataclass
class _Round:
    """One examination: what stays the same, and the agents that are to be ended."""

    ssh: Ssh
    environ: Mapping[str, str]
    tell: Tell
    agents: list[Agent] = field(default_factory=list)

    def visit(self, host: str | None) -> Visit:
        agent = start(host, self.ssh, self.environ)
        self.agents.append(agent)
        told = agent.ask("facts", ASK_SECONDS, paths=[str(Path.cwd())], ask_library=ASK_LIBRARY)
        clock = Clock(0.0, 0.0) if host is None else agent.clock()
        return Visit(agent, replace(facts_.read(told), clock=clock))

    def close(self) -> None:
        all_at_once({str(number): agent.close for number, agent in enumerate(self.agents)}, 5)


def examine(hosts: Sequence[Host], ranks: int | None, environ: Mapping[str, str], tell: Tell) -> tuple[Finding, ...]:
    """Local: everything about a job that is not started yet.

    Args:
        hosts: with their slots.
        ranks: how many there would be; one for each slot if None.
        environ: variables that the launcher would have.
        tell: is told what is being done.

    Returns:
        Findings, in the order in which they are to be read.
    """
    job = Job(hosts, ranks or sum(host.slots for host in hosts), environ)
    ssh = from_environment(environ, connect_timeout_seconds=CONNECT_SECONDS)
    with contextlib.closing(_Round(ssh, environ, tell)) as round_:
        return merged(_all(round_, job))


def is_here(name: str, own: Facts) -> bool:
    """Local: whether a name means this machine. May wait for a name server."""
    if name in ("localhost", own.name, own.name.partition(".")[0]):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError:
        return False  # ssh may know it all the same
    return bool(found & {interface.address for interface in own.interfaces})


def _all(round_: _Round, job: Job) -> Iterator[Finding]:
    names = [host.name for host in job.hosts]
    round_.tell(f"asking {len(names)} {_hosts(names)} (at most {ASK_SECONDS:.0f} s)")
    own = round_.visit(None)
    visits, failures, here = _visits(round_, names, own)
    yield from failures
    remote = tuple(name for name in visits if visits[name].agent is not own.agent)
    if remote:
        yield Finding(ssh_faults.CHECK, remote, "green", "answers without asking anything")
    facts = {name: visit.facts for name, visit in visits.items()}
    mpi = _mpi(facts[here])
    found = [
        *software.check(here, facts),
        *job_.check(job, mpi, facts),
        *machine.check(job, facts),
    ]
    if len(facts) > 1:
        round_.tell(f"trying connections between {len(facts)} hosts (at most {WAY_SECONDS:.0f} s)")
        found += _ways(round_, visits, mpi)
    yield from found
    yield from _trial(round_, job, facts, here, [*failures, *found])


def _visits(round_: _Round, names: Sequence[str], own: Visit) -> tuple[dict[str, Visit], list[Finding], str]:
    """The hosts that answer, what is wrong with the others, and the name of the host this runs on."""

    def visit(name: str) -> Visit:
        return own if is_here(name, own.facts) else round_.visit(name)

    asked = all_at_once({name: lambda name=name: visit(name) for name in names}, ASK_SECONDS + 1)  # type: ignore[misc]
    visits = {name: found for name, found in asked.items() if isinstance(found, Visit)}
    failures = [ssh_faults.diagnose(name, found) for name, found in asked.items() if isinstance(found, Unanswered)]
    here = next((name for name, found in visits.items() if found is own), None)
    if here is None:
        here = own.facts.name
        visits = {here: own, **visits}
    return visits, failures, here


def _mpi(here: Facts) -> Mpi | None:
    launcher = here.own_launcher
    return launcher.mpi if launcher is not None else None


def _ways(round_: _Round, visits: Mapping[str, Visit], mpi: Mpi | None) -> Iterator[Finding]:
    """Real connections between all hosts, to ports such as MPI's."""
    ranges = network.port_ranges(round_.environ, mpi)
    tokens = {name: secrets.token_hex(8) for name in visits}
    listening = all_at_once(
        {
            name: lambda name=name, agent=visit.agent: agent.ask(  # type: ignore[misc]
                "listen", LISTEN_SECONDS, token=tokens[name], ranges=ranges
            )
            for name, visit in visits.items()
        },
        LISTEN_SECONDS + 1,
    )
    ports = {
        name: [port for port in found["ports"] if port] for name, found in listening.items() if isinstance(found, dict)
    }
    facts = {name: visits[name].facts for name in ports}
    attempts = network.plan(facts, ports)
    results = all_at_once(
        {name: lambda name=name: _try(visits[name].agent, name, attempts, tokens) for name in ports},  # type: ignore[misc]
        CONNECT_ALL_SECONDS,
    )
    for name in [name for name in visits if isinstance(listening[name], Unanswered)]:
        yield Finding("network", (name,), "red", "the host stopped answering while it was examined")
    tried = [attempt for found in results.values() if isinstance(found, list) for attempt in found]
    yield from network.check(facts, tried, round_.environ, mpi)


def _try(
    agent: Agent, name: str, attempts: Sequence[network.Attempt], tokens: Mapping[str, str]
) -> list[network.Attempt]:
    mine = [attempt for attempt in attempts if attempt.source == name]
    targets = [(one.address, one.port, "" if one.port == network.SSH_PORT else tokens[one.target]) for one in mine]
    results = agent.ask("connect", CONNECT_ALL_SECONDS, targets=targets, wait_seconds=WAY_SECONDS)["results"]
    return [replace(attempt, result=result) for attempt, result in zip(mine, results, strict=True)]


def _trial(
    round_: _Round, job: Job, facts: Mapping[str, Facts], here: str, found: Sequence[Finding]
) -> Iterator[Finding]:
    mpi = _mpi(facts[here])
    names = tuple(host.name for host in job.hosts)
    red = dict.fromkeys(finding.check for finding in found if finding.colour == "red" and finding.check in NEEDED)
    if red or mpi is None:
        yield Finding("MPI job", names, "yellow", f"not tried: first mend {', '.join(red) or 'MPI'}")
        return
    round_.tell(f"starting a small MPI job on {len(names)} {_hosts(names)} (at most {TRIAL_SECONDS:.0f} s)")
    launcher = facts[here].own_launcher
    assert launcher is not None  # else there is no mpi
    yield from trial.check(_try_job(round_, job, mpi, launcher.path), names, {name: facts[name] for name in names})


def _try_job(round_: _Round, job: Job, mpi: Mpi, mpirun: str) -> trial.Trial:
    """One rank on each host, two on a single one, started as `mpitrain run` would."""
    hosts = tuple(job.hosts)
    request = Request(
        (sys.executable, "-m", "mpitrain.doctor.probe"),
        max(2, len(hosts)),
        hosts,
        map_by="node",
        oversubscribe=len(hosts) == 1,
        environment=forwarded(round_.environ, ()),
    )
    with SshProgram(round_.ssh) as program:
        command = build(request, mpi, mpirun, str(program.path))
        return trial.run(command.argv, command.environ(round_.environ), TRIAL_SECONDS)


def _hosts(names: Sequence[str]) -> str:
    return "host" if len(names) == 1 else "hosts"
