"""Which hosts reach which, over which interfaces and ports: what to try, and what the outcome means. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network

from mpitrain.doctor.facts import Facts, Interface
from mpitrain.doctor.finding import Finding
from mpitrain.launch.dialect import INTEL_MPI, Mpi

SSH_PORT = 22
SYSTEM_CHOOSES = (0, 0)
# Where Open MPI's ranks begin to look for a free port if they are told nothing, and how far they may look.
OPEN_MPI_FIRST_PORT, OPEN_MPI_PORTS = 1024, 64511
# Of the libraries that carry MPICH's and Intel MPI's messages: UCX, libfabric.
HYDRA_RANKS_VARIABLES = ("UCX_NET_DEVICES", "FI_TCP_IFACE")
MOST_WAYS, FEWEST_FOLLOWERS = 1 << 14, 8
NAMED = 3  # so many ways are named, the others counted


@dataclass(frozen=True)
class Attempt:
    """One connection that was tried."""

    source: str  # the host that called
    target: str  # the host that was called
    address: str  # one of the target's
    port: int  # of the target
    result: str = ""  # see `agent.connect`

    @property
    def arrived(self) -> bool:
        """Whether a packet came back from there, be it a refusal."""
        return self.result in ("ok", "refused")


def port_ranges(environ: Mapping[str, str], mpi: Mpi | None) -> tuple[tuple[int, int], ...]:
    """The ranges of ports that ranks and daemons will listen on; (0, 0) where the system chooses."""
    if mpi is None or not mpi.is_open_mpi:
        names = ("I_MPI_PORT_RANGE", "MPIEXEC_PORT_RANGE", "MPICH_PORT_RANGE", "MPIR_CVAR_CH3_PORT_RANGE")
        ranges = [found for name in names if (found := _range(environ.get(name, "")))]
        return tuple(dict.fromkeys(ranges)) or (SYSTEM_CHOOSES,) * 2
    first = _number(environ.get("OMPI_MCA_btl_tcp_port_min_v4", ""), OPEN_MPI_FIRST_PORT)
    count = _number(environ.get("OMPI_MCA_btl_tcp_port_range_v4", ""), OPEN_MPI_PORTS)
    daemons = _range(environ.get("PRTE_MCA_oob_tcp_dynamic_ipv4_ports", "")) or SYSTEM_CHOOSES
    return (first, min(first + count - 1, 65535)), daemons


def selected(interface: Interface, environ: Mapping[str, str], mpi: Mpi | None) -> bool | None:
    """Whether the ranks' MPI is told to use an interface; None where it is told nothing."""
    if mpi is not None and mpi.is_open_mpi:
        include, exclude = (environ.get(f"OMPI_MCA_btl_tcp_if_{word}", "") for word in ("include", "exclude"))
        if not include and exclude:
            return not _among(interface, exclude)
    else:
        include = next((environ[name] for name in HYDRA_RANKS_VARIABLES if environ.get(name)), "")
        if include == "all" or ":" in include:  # UCX: `mlx5_0:1` is an adapter, not an interface
            return None
    return _among(interface, include) if include else None


def candidates(host: Facts, environ: Mapping[str, str], mpi: Mpi | None) -> list[Interface]:
    """The interfaces that ranks may use, told or not. Open MPI leaves out none but the loopback."""
    told = [choice for interface in host.interfaces if (choice := selected(interface, environ, mpi)) is not None]
    if told:
        return [interface for interface in host.interfaces if selected(interface, environ, mpi)]
    if mpi is not None and mpi.is_open_mpi:
        return [interface for interface in host.interfaces if not interface.loopback]
    return _leading_out(host)


def ways(names: Sequence[str]) -> list[tuple[str, str]]:
    """Who is to call whom: everybody each other, but of very many hosts only some that follow, round the list."""
    followers = min(len(names) - 1, max(FEWEST_FOLLOWERS, MOST_WAYS // max(1, len(names))))
    return [
        (name, names[(position + step) % len(names)])
        for position, name in enumerate(names)
        for step in range(1, followers + 1)
    ]


def plan(facts: Mapping[str, Facts], ports: Mapping[str, Sequence[int]]) -> list[Attempt]:
    """What each host is to try: every address of other hosts, on their ports and on that of ssh."""
    return [
        Attempt(source, target, interface.address, port)
        for source, target in ways([name for name in facts if name in ports])
        for interface in _leading_out(facts[target])
        for port in (*ports[target], SSH_PORT)
    ]


def check(
    facts: Mapping[str, Facts], attempts: Sequence[Attempt], environ: Mapping[str, str], mpi: Mpi | None
) -> Iterator[Finding]:
    """Ways between hosts, ports, and interfaces that lead nowhere."""
    mute = tuple(name for name, host in facts.items() if not _leading_out(host))
    if mute:
        sentence = "has no IPv4 address that leads out, so that no connection can be tried"
        yield Finding("network", mute, "yellow", sentence, f"ssh {mute[0]} ip -4 address")
    facts = {name: host for name, host in facts.items() if name not in mute}
    seen = _Seen(facts, attempts)
    lost = [pair for pair in seen.pairs if not seen.addresses(pair, "arrived")]
    blocked = [pair for pair in seen.pairs if pair not in lost and not seen.addresses(pair, "open")]
    partly = [pair for pair in seen.pairs if seen.addresses(pair, "open") and seen.closed_ports(pair)]
    if lost:
        sentence = f"no connection, on any interface: {_named(lost)}"
        source, target = lost[0]
        address = next(iter(seen.tried(lost[0])), target)
        between = tuple(dict.fromkeys(name for pair in lost for name in pair))
        yield Finding("network", between, "red", sentence, f"ssh {source} ip route get {address}")
    for pairs in (blocked, partly):
        if pairs:
            yield _firewall(seen, pairs)
    yield from _interfaces(seen, environ, mpi)
    if seen.pairs and not lost and not blocked and not partly:
        every = "all " if len(seen.pairs) == len(facts) * (len(facts) - 1) else ""
        sentence = f"{every}{len(seen.pairs)} ways between hosts: the ports that MPI uses are open"
        yield Finding("firewall", tuple(facts), "green", sentence)


def common(facts: Mapping[str, Facts], attempts: Sequence[Attempt]) -> tuple[IPv4Network, ...]:
    """The networks over which every host is reached by every other."""
    seen = _Seen(facts, attempts)
    networks = dict.fromkeys(interface.network for host in facts.values() for interface in _leading_out(host))
    return tuple(network for network in networks if all(seen.open_within(pair, network) for pair in seen.pairs))


class _Seen:
    """The attempts, by pair of hosts and address."""

    def __init__(self, facts: Mapping[str, Facts], attempts: Sequence[Attempt]) -> None:
        self.facts = facts
        self._attempts: dict[tuple[str, str], list[Attempt]] = {}
        for attempt in attempts:
            self._attempts.setdefault((attempt.source, attempt.target), []).append(attempt)
        self.pairs = ways(list(facts))
        self._by_target: dict[str, list[tuple[str, str]]] = {}
        for pair in self.pairs:
            self._by_target.setdefault(pair[1], []).append(pair)

    def tried(self, pair: tuple[str, str]) -> dict[str, list[Attempt]]:
        """Attempts of a pair by address."""
        found: dict[str, list[Attempt]] = {}
        for attempt in self._attempts.get(pair, ()):
            found.setdefault(attempt.address, []).append(attempt)
        return found

    def addresses(self, pair: tuple[str, str], what: str) -> list[str]:
        """Addresses of the target from which something came back (`arrived`), or that have an `open` port of MPI."""
        if what == "arrived":
            return [address for address, tries in self.tried(pair).items() if any(one.arrived for one in tries)]
        return [
            address
            for address, tries in self.tried(pair).items()
            if any(one.result == "ok" and one.port != SSH_PORT for one in tries)
        ]

    def closed_ports(self, pair: tuple[str, str]) -> list[Attempt]:
        """What did not come through to the addresses that something came through to."""
        alive = self.addresses(pair, "open") or self.addresses(pair, "arrived")
        return [
            attempt
            for address in alive
            for attempt in self.tried(pair)[address]
            if attempt.result != "ok" and attempt.port != SSH_PORT
        ]

    def open_within(self, pair: tuple[str, str], network: IPv4Network) -> bool:
        """Whether the target has an open address in a network in which the source is, too."""
        within = [{i.address for i in _leading_out(self.facts[name]) if i.network == network} for name in pair]
        return bool(within[0]) and any(address in within[1] for address in self.addresses(pair, "open"))

    def leads(self, name: str, interface: Interface) -> bool:
        """Whether any other host has an open port at that address."""
        return any(interface.address in self.addresses(pair, "open") for pair in self._to(name))

    def arrives(self, name: str, interface: Interface) -> bool:
        """Whether anything came back from that address to any other host."""
        return any(interface.address in self.addresses(pair, "arrived") for pair in self._to(name))

    def strange(self, name: str, interface: Interface) -> bool:
        """Whether another machine answered at that address."""
        tries = [attempt for pair in self._to(name) for attempt in self.tried(pair).get(interface.address, ())]
        return any(attempt.result == "stranger" for attempt in tries)

    def _to(self, name: str) -> list[tuple[str, str]]:
        return self._by_target.get(name, [])


def _firewall(seen: _Seen, pairs: Sequence[tuple[str, str]]) -> Finding:
    closed = seen.closed_ports(pairs[0])
    how = {"silent": "no answer", "refused": "refused", "unreachable": "refused"}
    ports = ", ".join(f"{attempt.port} ({how.get(attempt.result, attempt.result)})" for attempt in closed[:NAMED])
    sentence = f"a firewall closes ports that MPI uses: {_named(pairs)}; ports tried: {ports}"
    target = pairs[0][1]
    network = next((i.network for i in _leading_out(seen.facts[target]) if i.address == closed[0].address), "NETWORK")
    remedy = f"on {target}: sudo ufw allow from {network}, or firewall-cmd --zone=trusted --add-source={network}"
    return Finding("firewall", tuple(dict.fromkeys(target for _, target in pairs)), "red", sentence, remedy)


def _interfaces(seen: _Seen, environ: Mapping[str, str], mpi: Mpi | None) -> Iterator[Finding]:
    """Interfaces that MPI may take, or is told to take, and that lead to no other host."""
    attempts = [attempt for pair in seen.pairs for tries in seen.tried(pair).values() for attempt in tries]
    networks = common(seen.facts, attempts)
    remedy = _choice(networks, seen, mpi)
    bad = False
    for name, host in seen.facts.items():
        choice = candidates(host, environ, mpi)
        if not choice:
            bad = True
            yield Finding("interfaces", (name,), "red", "has none of the interfaces that MPI is told to use", remedy)
        reached = any(seen.leads(name, interface) for interface in _leading_out(host))
        for interface in choice if reached else ():  # where nothing arrives at all, the network is at fault
            if not seen.leads(name, interface):
                bad = True
                told = bool(selected(interface, environ, mpi))
                yield _nowhere(seen, name, interface, told, mpi, remedy)
    if not bad and networks:
        names = sorted({i.name for host in seen.facts.values() for i in _leading_out(host) if i.network in networks})
        sentence = f"in common: {', '.join(map(str, networks))} ({', '.join(names)})"
        yield Finding("interfaces", tuple(seen.facts), "green", sentence)
    elif not bad and seen.pairs and all(seen.addresses(pair, "open") for pair in seen.pairs):
        yield Finding("interfaces", tuple(seen.facts), "green", "no network in common, but routes between all")


def _nowhere(seen: _Seen, name: str, interface: Interface, told: bool, mpi: Mpi | None, remedy: str) -> Finding:
    """Seen: Open MPI 5 hangs or aborts; MPICH 5 aborts where another host has an address in the same network.

    Where all hosts have another fabric than Ethernet, ranks do not depend on interfaces so much.
    """
    if not interface.leads_out:
        why = "it is inside this host"
    elif seen.strange(name, interface):
        why = "several hosts have that address"
    elif seen.arrives(name, interface):
        why = "packets arrive there, but its ports are closed"
    else:
        why = "no other host reaches it: there is no route"
    others = (one for other, host in seen.facts.items() if other != name for one in host.interfaces)
    shared = any(one.network == interface.network for one in others)
    tcp = not all(host.fabrics for host in seen.facts.values())
    fatal = told or (tcp and (shared or (mpi is not None and mpi.is_open_mpi)))
    sentence = f"{interface.name} ({interface.network}) leads to no other host ({why}), and MPI would use it"
    return Finding("interfaces", (name,), "red" if fatal else "yellow", sentence, remedy)


def _choice(networks: Sequence[IPv4Network], seen: _Seen, mpi: Mpi | None) -> str:
    """How to tell the MPI in use to take what works: a network, or where hosts have routers between them a name."""
    named = [
        {one.name for one in _leading_out(host) if (one.network == networks[0] if networks else seen.leads(name, one))}
        for name, host in seen.facts.items()
    ]
    names = sorted(set.intersection(*named)) if named else []
    if not networks and not names:
        return "give all hosts an address in one network, or routes between their networks"
    chosen = str(networks[0]) if networks else names[0]
    if mpi is not None and mpi.is_open_mpi:
        variables = ["OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_prte_if_include"][: 2 if mpi.has_prrte else 1]
    else:
        chosen = names[0] if names else min(set.union(*named))
        daemons = "I_MPI_HYDRA_IFACE" if mpi is not None and mpi.kind == INTEL_MPI else "HYDRA_IFACE"
        variables = [*HYDRA_RANKS_VARIABLES, daemons]
    words = " ".join(f"{variable}={chosen}" for variable in variables)
    return f"export {words}, or: mpitrain run --network-interfaces {chosen}"


def _leading_out(host: Facts) -> list[Interface]:
    return [interface for interface in host.interfaces if interface.leads_out]


def _among(interface: Interface, listed: str) -> bool:
    """Whether a list of names and networks has that interface."""
    for entry in (part.strip() for part in listed.split(",")):
        if entry == interface.name:
            return True
        if "/" in entry:
            try:
                network = ip_network(entry, strict=False)
            except ValueError:
                continue
            if interface.network.overlaps(network):
                return True
    return False


def _range(text: str) -> tuple[int, int] | None:
    """`5000:5100`, `5000-5100` or `5000`; of several with commas the first."""
    first, _, last = text.partition(",")[0].replace(":", "-").partition("-")
    if not first.strip().isdecimal() or not (last.strip() or "0").isdecimal():
        return None
    return int(first), int(last or first)


def _number(text: str, default: int) -> int:
    return int(text) if text.strip().isdecimal() else default


def _named(pairs: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
    return ", ".join(f"{source} to {target}" for source, target in pairs[:NAMED]) + more
