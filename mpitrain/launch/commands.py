"""A request in the words of one MPI: the command line, and the variables it is started with. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpitrain.errors import UsageError
from mpitrain.launch.dialect import INTEL_MPI, Mpi
from mpitrain.launch.request import Request, matches
from mpitrain.runtime.hostfile import Host, render

# Open MPI's daemons ask each other whether they are there; by default only after 300 s (20 s apart, 9 times). A network
# that is away for a few seconds, as when a switch or a bond changes its ways, is no lost host.
KEEPALIVE_SECONDS = {"time": 4, "intvl": 2, "probes": 4}

# Open MPI cuts names at their first dot: of worker.1.example.net and worker.2.example.net it would make one host.
WHOLE_NAMES = {5: "PRTE_MCA_prte_keep_fqdn_hostnames", 4: "OMPI_MCA_orte_keep_fqdn_hostnames"}

# What launchers, and ssh, need to do their work.
LAUNCHER_NEEDS = (
    *("HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_*"),
    *("SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR", "OMPI_*", "PRTE_*", "PMIX_*", "OPAL_*", "UCX_*", "FI_*"),
    *("HYDRA_*", "MPICH_*", "MPIR_CVAR_*", "I_MPI_*", "SLURM_*", "PBS_*", "LSB_*", "LSF_*", "SGE_*", "PE_HOSTFILE"),
)
# MPICH is built on UCX or on libfabric, Intel MPI on the latter.
FABRICS = ("UCX_NET_DEVICES", "FI_TCP_IFACE")


@dataclass(frozen=True)
class Command:
    """What starts the ranks."""

    argv: tuple[str, ...]  # program and arguments
    environment: Mapping[str, str] = field(default_factory=dict)  # variables it must have
    defaults: Mapping[str, str] = field(default_factory=dict)  # variables it has unless the user has set them otherwise
    # ranks on other hosts take part: they, and so those here, have the variables that are named only
    for_hosts: bool = False

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """All variables it is started with, given those here.

        With other hosts, the launcher is kept from what it need not know: Hydra sends all that it has to its
        daemons, in the clear, whatever it is told to hand on.
        """
        kept = {name: value for name, value in environ.items() if not self.for_hosts or matches(name, LAUNCHER_NEEDS)}
        kept.pop("_", None)
        # Hydra loses the variable that comes last (seen: MPICH 5.0.2): let it be the one that shells put there.
        return {**self.defaults, **kept, **self.environment, "_": self.argv[0]}


def build(request: Request, mpi: Mpi, mpirun: str, agent: str | None = None) -> Command:
    """The mpirun command.

    `agent` is the program in place of ssh; without one the MPI starts its daemons in its own way.

    Raises:
        UsageError: this MPI cannot do what is asked for.
    """
    if mpi.is_open_mpi:
        return (_open_mpi_5 if mpi.has_prrte else _open_mpi_4)(request, mpirun, agent)
    return (_intel if mpi.kind == INTEL_MPI else _hydra)(request, mpirun, agent)


def _open_mpi_5(request: Request, mpirun: str, agent: str | None) -> Command:
    mapping = f"{request.map_by}{':OVERSUBSCRIBE' * request.oversubscribe}"
    argv = [mpirun, "-np", str(request.ranks), *_hosts(request, "--host")]
    argv += ["--map-by", mapping, "--bind-to", _open_mpi_binding(request, "package")]
    argv += ["--output", "tag"] if request.tag_output else []
    environment = {"PRTE_MCA_prte_if_include": ",".join(request.interfaces)} if request.interfaces else {}
    defaults = {f"PRTE_MCA_oob_tcp_keepalive_{name}": str(value) for name, value in KEEPALIVE_SECONDS.items()}
    defaults |= {WHOLE_NAMES[5]: "1"} if request.hosts else {}
    # By default hosts start each other's daemons, for which they would need each other's keys.
    environment |= {"PRTE_MCA_plm_ssh_agent": agent, "PRTE_MCA_plm_ssh_no_tree_spawn": "1"} if agent else {}
    return _open_mpi(request, argv, environment, defaults)


def _open_mpi_4(request: Request, mpirun: str, agent: str | None) -> Command:
    argv = [mpirun, "-np", str(request.ranks), *_hosts(request, "--host"), "--map-by", request.map_by]
    argv += ["--bind-to", _open_mpi_binding(request, "socket")]
    argv += ["--oversubscribe"] * request.oversubscribe + ["--tag-output"] * request.tag_output
    environment = {"OMPI_MCA_oob_tcp_if_include": ",".join(request.interfaces)} if request.interfaces else {}
    defaults = {f"OMPI_MCA_oob_tcp_keepalive_{name}": str(value) for name, value in KEEPALIVE_SECONDS.items()}
    defaults |= {WHOLE_NAMES[4]: "1"} if request.hosts else {}
    # Its daemons look for the agent too, on their hosts, and end without one (seen: 4.1.4): there they find their own.
    agents = {"OMPI_MCA_plm_rsh_agent": f"{agent} : ssh : rsh", "OMPI_MCA_plm_rsh_no_tree_spawn": "1"}
    environment |= agents if agent else {}
    return _open_mpi(request, argv, environment, defaults)


def _open_mpi(request: Request, argv: list[str], environment: dict[str, str], defaults: dict[str, str]) -> Command:
    """What versions have in common."""
    if request.allow_root:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if request.oversubscribe:
        # A rank that waits gives way to the one it waits for.
        defaults = {**defaults, "OMPI_MCA_mpi_yield_when_idle": "1"}
    environment |= _ranks_interfaces(request)
    if request.interfaces:
        environment["OMPI_MCA_btl_tcp_if_include"] = ",".join(request.interfaces)
    for name in _names(request):
        # Those of Open MPI's own settings reach the ranks by themselves.
        argv += [] if name.startswith(("OMPI_MCA_", "PMIX_MCA_")) else ["-x", name]
    environment = {**request.environment, **environment}
    return Command((*argv, *request.extra, *request.command), environment, defaults, bool(request.hosts))


def _open_mpi_binding(request: Request, socket: str) -> str:
    return socket if request.bind_to == "socket" else request.bind_to


def _hydra(request: Request, mpirun: str, agent: str | None) -> Command:
    environment = {**_ranks_interfaces(request, *FABRICS), **request.environment}
    argv = [mpirun, *_hydra_environment(request, environment), *_hosts(request, "-hosts")]
    argv += ["-launcher", "ssh", "-launcher-exec", agent] if agent else []
    argv += _hydra_interface(request) + ["-prepend-rank"] * request.tag_output
    argv += ["-bind-to", request.bind_to] + ["-ppn", "1"] * (request.map_by == "node" and bool(request.hosts))
    argv += [*request.extra, "-n", str(request.ranks), *request.command]
    return Command(tuple(argv), environment, {}, bool(request.hosts))


def _intel(request: Request, mpirun: str, agent: str | None) -> Command:
    """Intel MPI: Hydra with words of its own; hosts with their numbers of ranks are told as sections."""
    environment = {**_ranks_interfaces(request, FABRICS[1]), **request.environment}
    argv = [mpirun, *_hydra_environment(request, environment)]
    argv += ["-bootstrap", "ssh", "-bootstrap-exec", agent] if agent else []
    argv += _hydra_interface(request) + ["-prepend-rank"] * request.tag_output + list(request.extra)
    if not request.hosts:
        argv += ["-n", str(request.ranks), *request.command]
    elif request.map_by == "node":
        names = ",".join(host.name for host in request.hosts)
        argv += ["-ppn", "1", "-hosts", names, "-n", str(request.ranks), *request.command]
    else:
        for number, (host, ranks) in enumerate(shares(request.ranks, request.hosts)):
            argv += [":"] * (number > 0) + ["-host", host.name, "-n", str(ranks), *request.command]
    pinning = {"I_MPI_PIN": "off"} if request.bind_to == "none" else {"I_MPI_PIN_DOMAIN": request.bind_to}
    return Command(tuple(argv), environment, pinning, bool(request.hosts))


def _hydra_environment(request: Request, environment: Mapping[str, str]) -> list[str]:
    """Hydra hands on everything unless it is told what."""
    if not request.hosts:
        return []
    return ["-genvlist", ",".join(sorted(environment))] if environment else ["-genvnone"]


def _hydra_interface(request: Request) -> list[str]:
    if not request.interfaces:
        return []
    if len(request.interfaces) > 1 or "/" in request.interfaces[0]:
        raise UsageError(
            f"MPICH and Intel MPI take one interface by its name, not {','.join(request.interfaces)}: "
            "write for instance --network-interfaces eth0"
        )
    return ["-iface", request.interfaces[0]]


def _ranks_interfaces(request: Request, *more: str) -> dict[str, str]:
    """Of the libraries that ranks exchange data through, those that take names: NCCL, and what the MPI is built on."""
    names = [name for name in request.interfaces if "/" not in name]
    if not names or len(names) < len(request.interfaces):
        return {}
    found = dict.fromkeys(("NCCL_SOCKET_IFNAME", *more), ",".join(names))
    return {name: value for name, value in found.items() if name not in request.environment}


def _hosts(request: Request, option: str) -> list[str]:
    return [option, render(request.hosts, "list").strip()] if request.hosts else []


def _names(request: Request) -> list[str]:
    """Of the variables that must be named to reach other hosts; here they are simply there."""
    return sorted(request.environment) if request.hosts else []


def shares(ranks: int, hosts: Sequence[Host]) -> list[tuple[Host, int]]:
    """How many ranks each host has when slots are filled in turn, and filled again if there are too few."""
    counts = [0] * len(hosts)
    left = ranks
    while left > 0:
        for position, host in enumerate(hosts):
            taken = min(left, host.slots)
            counts[position] += taken
            left -= taken
    return [(host, count) for host, count in zip(hosts, counts, strict=True) if count]


# What tasks of a step need to be programs of their user at all: a list of names replaces the whole environment.
SRUN_BASICS = ("HOME", "USER", "LOGNAME", "SHELL", "TERM", "TMPDIR", "PATH", "LD_LIBRARY_PATH")


def build_srun(request: Request, mpi: Mpi, plugin: str, environ: Mapping[str, str], srun: str = "srun") -> Command:
    """The srun command, within an allocation."""
    argv = [srun, f"--mpi={plugin}", f"--ntasks={request.ranks}", "--kill-on-bad-exit=1"]
    if request.hosts:
        argv += [f"--nodes={len(request.hosts)}", f"--nodelist={render(request.hosts, 'slurm').strip()}"]
    argv += [f"--distribution={'cyclic' if request.map_by == 'node' else 'block'}"]
    # "none" would take srun's hands off a confinement that the site wants; it then leaves the allocation's.
    bindings = {"core": "cores", "numa": "ldoms", "socket": "sockets"}
    argv += [f"--cpu-bind={bindings[request.bind_to]}"] if request.bind_to in bindings else []
    argv += ["--overcommit"] * request.oversubscribe + ["--label"] * request.tag_output
    if environ.get("SLURM_CPUS_PER_TASK"):
        argv.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")  # srun no longer takes it from sbatch
    forced = _ranks_interfaces(request, *(() if mpi.is_open_mpi else FABRICS))
    if mpi.is_open_mpi and request.interfaces:
        forced["OMPI_MCA_btl_tcp_if_include"] = ",".join(request.interfaces)
    names = sorted({*request.environment, *forced, *(name for name in SRUN_BASICS if name in environ)})
    argv.append(f"--export={','.join(names)}")
    # Slurm tells the ranks to prove who they are by munge or else natively. The PMIx of a wheel knows no munge, and
    # would say so many times.
    proof = ("env", "PMIX_SECURITY_MODE=native") if mpi.is_open_mpi else ()
    return Command((*argv, *request.extra, *proof, *request.command), {**request.environment, **forced}, {}, True)
