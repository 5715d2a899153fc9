"""One request in the words of each MPI: command lines and variables, compared whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mpitrain.errors import UsageError
from mpitrain.launch.commands import Command, build, build_srun, shares
from mpitrain.launch.dialect import INTEL_MPI, MPICH, OPEN_MPI, Mpi
from mpitrain.launch.request import Request
from mpitrain.runtime.hostfile import Host

OMPI5, OMPI4, HYDRA, INTEL = Mpi(OPEN_MPI, (5, 0, 11)), Mpi(OPEN_MPI, (4, 1, 4)), Mpi(MPICH, (5, 0)), Mpi(INTEL_MPI)
PROGRAM = ("/env/bin/python", "-m", "mpitrain", "a b.py")
LOCAL = Request(PROGRAM, 2)
HOSTS = Request(PROGRAM, 6, (Host("a", 4), Host("b", 2)), environment={"PATH": "/bin", "SEED": "1 2"})
ALL = dataclasses.replace(
    HOSTS,
    ranks=8,
    map_by="node",
    bind_to="socket",
    oversubscribe=True,
    allow_root=True,
    interfaces=("eth0",),
    tag_output=True,
    extra=("--more", "x"),
)
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
KEEPALIVE = {"time": "4", "intvl": "2", "probes": "4"}


WHOLE_NAMES = {
    "PRTE": {"PRTE_MCA_prte_keep_fqdn_hostnames": "1"},
    "OMPI": {"OMPI_MCA_orte_keep_fqdn_hostnames": "1"},
}


def keepalive(prefix: str) -> dict[str, str]:
    return {f"{prefix}_MCA_oob_tcp_keepalive_{name}": value for name, value in KEEPALIVE.items()}


def told(request: Request, mpi: Mpi, agent: str | None = None) -> tuple[str, Command]:
    """The command as one line, without the program at its end."""
    command = build(request, mpi, "mpirun", agent)
    assert command.argv[-len(PROGRAM) :] == PROGRAM
    return " ".join(command.argv[: -len(PROGRAM)]), command


@pytest.mark.parametrize(
    ("mpi", "line", "defaults"),
    [
        (OMPI5, "mpirun -np 2 --map-by slot --bind-to none", keepalive("PRTE")),
        (OMPI4, "mpirun -np 2 --map-by slot --bind-to none", keepalive("OMPI")),
        (HYDRA, "mpirun -bind-to none -n 2", {}),
        (INTEL, "mpirun -n 2", {"I_MPI_PIN": "off"}),
    ],
)
def test_this_host_alone(mpi: Mpi, line: str, defaults: dict[str, str]) -> None:
    shown, command = told(LOCAL, mpi)
    assert shown == line
    assert (dict(command.environment), dict(command.defaults)) == ({}, defaults)
    assert command.environ({"SECRET": "s"})["SECRET"] == "s"


@pytest.mark.parametrize(
    ("mpi", "line", "agent_variables"),
    [
        (
            OMPI5,
            "mpirun -np 6 --host a:4,b:2 --map-by slot --bind-to none -x PATH -x SEED",
            {"PRTE_MCA_plm_ssh_agent": "/t/ssh", "PRTE_MCA_plm_ssh_no_tree_spawn": "1"},
        ),
        (
            OMPI4,
            "mpirun -np 6 --host a:4,b:2 --map-by slot --bind-to none -x PATH -x SEED",
            {"OMPI_MCA_plm_rsh_agent": "/t/ssh : ssh : rsh", "OMPI_MCA_plm_rsh_no_tree_spawn": "1"},
        ),
        (
            HYDRA,
            "mpirun -genvlist PATH,SEED -hosts a:4,b:2 -launcher ssh -launcher-exec /t/ssh -bind-to none -n 6",
            {},
        ),
    ],
)
def test_hosts_by_ssh(mpi: Mpi, line: str, agent_variables: dict[str, str]) -> None:
    shown, command = told(HOSTS, mpi, "/t/ssh")
    assert shown == line
    assert command.environment == {"PATH": "/bin", "SEED": "1 2", **agent_variables}


def test_intel_mpi_has_a_section_for_each_host() -> None:
    command = build(HOSTS, INTEL, "mpirun", "/t/ssh")
    options = ["-genvlist", "PATH,SEED", "-bootstrap", "ssh", "-bootstrap-exec", "/t/ssh"]
    first, second = (["-host", host, "-n", count, *PROGRAM] for host, count in (("a", "4"), ("b", "2")))
    assert command.argv == ("mpirun", *options, *first, ":", *second)


@pytest.mark.parametrize(
    ("mpi", "line", "environment", "defaults"),
    [
        (
            OMPI5,
            (
                "mpirun -np 8 --host a:4,b:2 --map-by node:OVERSUBSCRIBE --bind-to package --output tag "
                "-x PATH -x SEED --more x"
            ),
            {
                **ROOT,
                "PRTE_MCA_prte_if_include": "eth0",
                "OMPI_MCA_btl_tcp_if_include": "eth0",
                "NCCL_SOCKET_IFNAME": "eth0",
            },
            {**keepalive("PRTE"), **WHOLE_NAMES["PRTE"], "OMPI_MCA_mpi_yield_when_idle": "1"},
        ),
        (
            OMPI4,
            (
                "mpirun -np 8 --host a:4,b:2 --map-by node --bind-to socket --oversubscribe --tag-output "
                "-x PATH -x SEED --more x"
            ),
            {
                **ROOT,
                "OMPI_MCA_oob_tcp_if_include": "eth0",
                "OMPI_MCA_btl_tcp_if_include": "eth0",
                "NCCL_SOCKET_IFNAME": "eth0",
            },
            {**keepalive("OMPI"), **WHOLE_NAMES["OMPI"], "OMPI_MCA_mpi_yield_when_idle": "1"},
        ),
        (
            HYDRA,
            (
                "mpirun -genvlist FI_TCP_IFACE,NCCL_SOCKET_IFNAME,PATH,SEED,UCX_NET_DEVICES -hosts a:4,b:2 -iface eth0 "
                "-prepend-rank -bind-to socket -ppn 1 --more x -n 8"
            ),
            {"NCCL_SOCKET_IFNAME": "eth0", "UCX_NET_DEVICES": "eth0", "FI_TCP_IFACE": "eth0"},
            {},
        ),
        (
            INTEL,
            (
                "mpirun -genvlist FI_TCP_IFACE,NCCL_SOCKET_IFNAME,PATH,SEED -iface eth0 -prepend-rank --more x "
                "-ppn 1 -hosts a,b -n 8"
            ),
            {"NCCL_SOCKET_IFNAME": "eth0", "FI_TCP_IFACE": "eth0"},
            {"I_MPI_PIN_DOMAIN": "socket"},
        ),
    ],
)
def test_everything(mpi: Mpi, line: str, environment: dict[str, str], defaults: dict[str, str]) -> None:
    shown, command = told(ALL, mpi)
    assert shown == line
    assert command.environment == {"PATH": "/bin", "SEED": "1 2", **environment}
    assert command.defaults == defaults


def test_networks_are_words_of_open_mpi_only() -> None:
    request = dataclasses.replace(HOSTS, interfaces=("10.0.0.0/24", "10.1.0.0/24"))
    environment = build(request, OMPI5, "mpirun").environment
    assert environment["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24,10.1.0.0/24"
    assert "NCCL_SOCKET_IFNAME" not in environment
    for mpi in (HYDRA, INTEL):
        with pytest.raises(UsageError, match=r"one interface by its name, not 10\.0\.0\.0/24,10\.1"):
            build(request, mpi, "mpirun")


def test_what_the_user_has_set_wins_over_defaults_and_loses_to_options() -> None:
    command = build(ALL, OMPI5, "mpirun")
    handed_on = {"OMPI_MCA_btl_tcp_if_include": "ib0", "OMPI_MCA_plm_rsh_agent": "/my/ssh"}
    for mpi in (OMPI5, OMPI4):
        found = build(dataclasses.replace(ALL, environment=handed_on), mpi, "mpirun", "/t/ssh").environment
        assert found["OMPI_MCA_btl_tcp_if_include"] == "eth0"
        assert found["OMPI_MCA_plm_rsh_agent"] == ("/my/ssh" if mpi.has_prrte else "/t/ssh : ssh : rsh")
    environ = command.environ({"OMPI_MCA_mpi_yield_when_idle": "0", "PRTE_MCA_prte_if_include": "ib0", "PATH": "/x"})
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "0"
    assert environ["PRTE_MCA_prte_if_include"] == "eth0"
    assert environ["PRTE_MCA_oob_tcp_keepalive_time"] == "4"


@pytest.mark.parametrize("mpi", [OMPI5, OMPI4, HYDRA, INTEL], ids=str)
def test_only_what_is_named_leaves_this_host(mpi: Mpi) -> None:
    here = {"AWS_SECRET": "s", "HOME": "/h", "SSH_AUTH_SOCK": "/s", "_": "/bin/sh", "SLURM_JOB_ID": "7"}
    environ = build(HOSTS, mpi, "mpirun").environ(here)
    assert "AWS_SECRET" not in environ
    assert {"HOME", "SSH_AUTH_SOCK", "SLURM_JOB_ID", "SEED"} <= set(environ)
    assert list(environ)[-1] == "_"  # Hydra loses the last one


@pytest.mark.parametrize(
    ("ranks", "slots", "expected"),
    [(6, (4, 2), [4, 2]), (5, (4, 2), [4, 1]), (3, (4, 2), [3]), (9, (4, 2), [7, 2]), (13, (4, 2), [9, 4])],
)
def test_shares(ranks: int, slots: tuple[int, ...], expected: list[int]) -> None:
    hosts = [Host(f"h{number}", count) for number, count in enumerate(slots)]
    assert [count for _, count in shares(ranks, hosts)] == expected
    assert sum(expected) == ranks


@pytest.mark.parametrize(
    ("request_", "mpi", "plugin", "environ", "line"),
    [
        (
            Request(PROGRAM, 4),
            OMPI5,
            "pmix",
            {"HOME": "/h"},
            (
                "srun --mpi=pmix --ntasks=4 --kill-on-bad-exit=1 --distribution=block --export=HOME "
                "env PMIX_SECURITY_MODE=native"
            ),
        ),
        (
            Request(PROGRAM, 4, environment={"SEED": "1"}),
            HYDRA,
            "pmi2",
            {"HOME": "/h", "SLURM_CPUS_PER_TASK": "3"},
            "srun --mpi=pmi2 --ntasks=4 --kill-on-bad-exit=1 --distribution=block --cpus-per-task=3 --export=HOME,SEED",
        ),
        (
            ALL,
            HYDRA,
            "pmi2",
            {},
            (
                "srun --mpi=pmi2 --ntasks=8 --kill-on-bad-exit=1 --nodes=2 --nodelist=a,b --distribution=cyclic "
                "--cpu-bind=sockets --overcommit --label "
                "--export=FI_TCP_IFACE,NCCL_SOCKET_IFNAME,PATH,SEED,UCX_NET_DEVICES --more x"
            ),
        ),
    ],
)
def test_srun(request_: Request, mpi: Mpi, plugin: str, environ: dict[str, str], line: str) -> None:
    command = build_srun(request_, mpi, plugin, environ)
    assert " ".join(command.argv[: -len(PROGRAM)]) == line
    assert command.argv[-len(PROGRAM) :] == PROGRAM
    named = next(word for word in command.argv if word.startswith("--export=")).removeprefix("--export=").split(",")
    assert set(named) <= set(command.environ(environ))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"interfaces": ("eth0; rm",)}, "no network interface"),
        ({"interfaces": ("-x",)}, "no network interface"),
        ({"interfaces": ("",)}, "no network interface"),
        ({"bind_to": "thread"}, "bound to thread"),
        ({"map_by": "rack"}, "mapped by rack"),
    ],
)
def test_requests_that_cannot_be(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Request(PROGRAM, 1, **fields)
