"""Ways between hosts: what is tried, and what is said of the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_network

import pytest

from mpitrain.doctor.facts import Facts, Interface
from mpitrain.doctor.finding import Finding
from mpitrain.doctor.network import SSH_PORT, Attempt, check, common, plan, port_ranges, ways
from mpitrain.launch.dialect import Mpi
from tests.unit.doctor.hosts import INTEL_2021, LOOPBACK, MPICH_5, OPEN_MPI_4, OPEN_MPI_5, host, hosts, interface

PORTS = (1024, 40000)
Outcome = Callable[[Attempt], str]


def tried(facts: dict[str, Facts], outcome: Outcome) -> list[Attempt]:
    attempts = plan(facts, dict.fromkeys(facts, PORTS))
    return [replace(attempt, result=outcome(attempt)) for attempt in attempts]


def bad(
    facts: dict[str, Facts], outcome: Outcome, environ: dict[str, str] | None = None, mpi: Mpi = OPEN_MPI_5
) -> list[Finding]:
    return [f for f in check(facts, tried(facts, outcome), environ or {}, mpi) if f.colour != "green"]


def fine(attempt: Attempt) -> str:
    return "ok" if attempt.address.startswith("10.") else "silent"


def two_interfaces(number: int, name: str = "eth1", address: str = "192.168.9.{}", **others: bool) -> Facts:
    second = interface(name, address.format(number + 1), **others)
    return host(number, interfaces=(LOOPBACK, interface("eth0", f"10.0.0.{number + 1}"), second))


def test_every_host_tries_every_address_and_port_of_every_other() -> None:
    attempts = plan(hosts(3), dict.fromkeys(hosts(3), PORTS))
    assert len(attempts) == 6 * 3
    assert Attempt("node2", "node0", "10.0.0.1", SSH_PORT) in attempts
    assert not any(attempt.address.startswith("127.") for attempt in attempts)


def test_of_very_many_hosts_each_calls_some() -> None:
    few, many = ways(list("abcd")), ways([str(number) for number in range(2000)])
    assert sorted(few) == sorted((one, other) for one in "abcd" for other in "abcd" if one != other)
    assert len(many) == len(set(many)) == 2000 * 8
    assert {target for _, target in many} == {source for source, _ in many}
    assert ways(["a"]) == ways([]) == []


def test_all_well() -> None:
    assert bad(hosts(3), fine) == []
    found = list(check(hosts(3), tried(hosts(3), fine), {}, OPEN_MPI_5))
    assert [(f.check, f.colour) for f in found] == [("interfaces", "green"), ("firewall", "green")]
    assert found[0].sentence == "in common: 10.0.0.0/24 (eth0)"
    assert found[1].sentence.startswith("all 6 ways")


def test_a_host_that_nothing_leads_to() -> None:
    found = bad(hosts(3), lambda a: "unreachable" if "node2" in (a.source, a.target) else "ok")
    assert [(f.check, f.colour) for f in found] == [("network", "red")]
    assert (
        "no connection, on any interface: node0 to node2, node1 to node2, node2 to node0 and 1 more"
        in found[0].sentence
    )
    assert found[0].remedy == "ssh node0 ip route get 10.0.0.3"


@pytest.mark.parametrize("result", ["silent", "refused", "unreachable"])
def test_ports_that_a_firewall_closes(result: str) -> None:
    found = bad(hosts(3), lambda a: result if a.target == "node1" and a.port >= 1024 else "ok")
    assert [(f.check, f.colour, f.hosts) for f in found] == [("firewall", "red", ("node1",))]
    assert "node0 to node1, node2 to node1; ports tried: 1024 (" in found[0].sentence
    assert found[0].remedy.startswith("on node1: sudo ufw allow from 10.0.0.0/24")


def test_part_of_the_ports_is_closed() -> None:
    found = bad(hosts(2), lambda a: "silent" if a.port == 40000 and a.source == "node0" else "ok")
    assert [(f.check, f.colour, f.hosts) for f in found] == [("firewall", "red", ("node1",))]
    assert "node0 to node1; ports tried: 40000 (no answer)" in found[0].sentence


def test_sshd_on_another_port_does_not_matter() -> None:
    assert bad(hosts(2), lambda a: "refused" if a.port == SSH_PORT else "ok") == []


@pytest.mark.parametrize(
    ("mpi", "remedy"),
    [
        (
            OPEN_MPI_5,
            "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24 PRTE_MCA_prte_if_include=10.0.0.0/24, or: mpitrain run",
        ),
        (
            OPEN_MPI_4,
            "export OMPI_MCA_btl_tcp_if_include=10.0.0.0/24, or: mpitrain run --network-interfaces 10.0.0.0/24",
        ),
        (
            MPICH_5,
            "export UCX_NET_DEVICES=eth0 FI_TCP_IFACE=eth0 HYDRA_IFACE=eth0, or: mpitrain run --network-interface",
        ),
        (INTEL_2021, "I_MPI_HYDRA_IFACE=eth0"),
    ],
)
def test_an_interface_that_leads_nowhere(mpi: Mpi, remedy: str) -> None:
    facts = {f"node{number}": two_interfaces(number) for number in range(2)}
    found = bad(facts, fine, mpi=mpi)
    assert [(f.check, f.colour) for f in found] == [("interfaces", "red")] * 2
    assert "eth1 (192.168.9.0/24) leads to no other host (no other host reaches it" in found[0].sentence
    assert remedy in found[0].remedy


@pytest.mark.parametrize(("mpi", "colour"), [(OPEN_MPI_5, "red"), (MPICH_5, "yellow")])
def test_an_interface_that_only_one_host_has(mpi: Mpi, colour: str) -> None:
    found = bad(hosts(3, node1=two_interfaces(1)), fine, mpi=mpi)
    assert [(f.check, f.colour, f.hosts) for f in found] == [("interfaces", colour, ("node1",))]


def test_an_address_that_several_hosts_have() -> None:
    facts = {f"node{number}": two_interfaces(number, address="192.168.9.1") for number in range(2)}
    found = bad(facts, lambda a: "ok" if a.address.startswith("10.") or a.port == SSH_PORT else "stranger")
    assert "several hosts have that address" in found[0].sentence


def test_an_interface_whose_ports_are_closed() -> None:
    facts = {f"node{number}": two_interfaces(number) for number in range(2)}
    found = bad(facts, lambda a: "ok" if a.address.startswith("10.") or a.port == SSH_PORT else "silent")
    assert [(f.check, f.colour) for f in found] == [("interfaces", "red")] * 2
    assert "packets arrive there, but its ports are closed" in found[0].sentence


@pytest.mark.parametrize(("mpi", "count"), [(OPEN_MPI_5, 2), (MPICH_5, 0)])
def test_bridges_of_containers(mpi: Mpi, count: int) -> None:
    facts = {f"node{number}": two_interfaces(number, "docker0", "172.17.0.1") for number in range(2)}
    found = bad(facts, fine, mpi=mpi)
    assert [(f.check, f.colour) for f in found] == [("interfaces", "red")] * count
    assert all("it is inside this host" in f.sentence for f in found)
    assert all(attempt.address.startswith("10.") for attempt in tried(facts, fine))


@pytest.mark.parametrize(
    ("environ", "mpi", "colours"),
    [
        ({"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8"}, OPEN_MPI_5, []),
        ({"OMPI_MCA_btl_tcp_if_include": "eth0"}, OPEN_MPI_5, []),
        ({"OMPI_MCA_btl_tcp_if_exclude": "lo,eth1"}, OPEN_MPI_5, []),
        ({"UCX_NET_DEVICES": "eth0"}, MPICH_5, []),
        ({"OMPI_MCA_btl_tcp_if_include": "eth1"}, OPEN_MPI_5, ["red", "red"]),
        ({"OMPI_MCA_btl_tcp_if_include": "ib0"}, OPEN_MPI_5, ["red", "red"]),
        ({"UCX_NET_DEVICES": "eth1"}, MPICH_5, ["red", "red"]),
        ({"UCX_NET_DEVICES": "eth0"}, OPEN_MPI_5, ["red", "red"]),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, MPICH_5, ["red", "red"]),
    ],
)
def test_what_mpi_is_told_to_use(environ: dict[str, str], mpi: Mpi, colours: list[str]) -> None:
    facts = {f"node{number}": two_interfaces(number) for number in range(2)}
    found = bad(facts, fine, environ, mpi)
    assert [f.colour for f in found] == colours
    assert {f.check for f in found} <= {"interfaces"}


def test_networks_that_are_routed_are_enough() -> None:
    facts = {
        name: host(number, interfaces=(interface("eth0", f"10.{number}.0.1"),)) for number, name in enumerate("ab")
    }
    assert bad(facts, fine) == []
    assert common(facts, tried(facts, fine)) == ()


def test_names_serve_where_networks_differ() -> None:
    docker = interface("docker0", "172.17.0.1")
    facts = {
        name: host(number, interfaces=(Interface("ens4", f"10.{number}.0.1", "255.255.255.255"), docker))
        for number, name in enumerate("ab")
    }
    found = bad(facts, fine)
    assert [(f.check, f.colour) for f in found] == [("interfaces", "red")] * 2
    assert found[0].remedy.startswith("export OMPI_MCA_btl_tcp_if_include=ens4 PRTE_MCA_prte_if_include=ens4")


def test_a_host_without_an_address() -> None:
    found = bad(hosts(3, node1=host(1, interfaces=(LOOPBACK,))), fine)
    assert [(f.check, f.colour, f.hosts) for f in found] == [("network", "yellow", ("node1",))]


def test_hosts_with_a_fabric_do_not_depend_on_interfaces() -> None:
    facts = {f"node{number}": replace(two_interfaces(number), fabrics=("mlx5_0",)) for number in range(2)}
    assert [f.colour for f in bad(facts, fine)] == ["yellow"] * 2
    assert [f.colour for f in bad(facts, fine, {"OMPI_MCA_btl_tcp_if_include": "eth1"})] == ["red"] * 2


def test_the_network_that_all_share() -> None:
    facts = {f"node{number}": two_interfaces(number) for number in range(3)}
    assert common(facts, tried(facts, fine)) == (ip_network("10.0.0.0/24"),)


@pytest.mark.parametrize(
    ("environ", "mpi", "expected"),
    [
        ({}, OPEN_MPI_5, ((1024, 65534), (0, 0))),
        (
            {"OMPI_MCA_btl_tcp_port_min_v4": "5000", "OMPI_MCA_btl_tcp_port_range_v4": "100"},
            OPEN_MPI_5,
            ((5000, 5099), (0, 0)),
        ),
        ({"PRTE_MCA_oob_tcp_dynamic_ipv4_ports": "6000-6100,7000"}, OPEN_MPI_5, ((1024, 65534), (6000, 6100))),
        ({}, MPICH_5, ((0, 0), (0, 0))),
        ({"MPIEXEC_PORT_RANGE": "5000:5100"}, MPICH_5, ((5000, 5100),)),
        ({"MPICH_PORT_RANGE": "5000:5100", "MPIEXEC_PORT_RANGE": "5000:5100"}, MPICH_5, ((5000, 5100),)),
        ({"MPIEXEC_PORT_RANGE": "any"}, MPICH_5, ((0, 0), (0, 0))),
        ({"I_MPI_PORT_RANGE": "5000:5100"}, INTEL_2021, ((5000, 5100),)),
    ],
)
def test_ports(environ: dict[str, str], mpi: Mpi, expected: tuple[tuple[int, int], ...]) -> None:
    assert port_ranges(environ, mpi) == expected
