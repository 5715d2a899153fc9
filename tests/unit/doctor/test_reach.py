"""Connections between the agents of hosts: who listens, who calls, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from mpitrain.doctor.connection import Agent
from mpitrain.doctor.network import SSH_PORT
from mpitrain.doctor.reach import Reach
from mpitrain.doctor.ssh_faults import Unanswered
from tests.unit.doctor.hosts import hosts


class Answering:
    """Stands for the agent of one host, and for the network: what listens can be called with its token."""

    def __init__(self, number: int, listening: dict[tuple[str, int], str], dumb: str = "") -> None:
        self.address, self.listening, self.dumb = f"10.0.0.{number + 1}", listening, dumb
        self.streamed: list[Mapping[str, Any]] = []

    def ask(self, do: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        if do == self.dumb:
            raise Unanswered(f"{self.address} did not answer")
        if do == "listen":
            ports = [first + 1 for first, _ in arguments["ranges"]]
            self.listening.update({(self.address, port): arguments["token"] for port in ports})
            return {"ports": [*ports, 0]}  # of one range none was free
        if do == "stream":
            self.streamed.append(arguments)
            return {"bits_per_second": 1e9}
        results = [
            "ok" if self.listening.get((address, port), "") == token else "refused"
            for address, port, token in arguments["targets"]
        ]
        return {"results": results}


def reach(dumb: Mapping[str, str]) -> tuple[Reach, dict[str, Answering]]:
    listening: dict[tuple[str, int], str] = {}
    agents = {f"node{n}": Answering(n, listening, dumb.get(f"node{n}", "")) for n in range(3)}
    return Reach(cast(Mapping[str, Agent], agents), hosts(3)), agents


def test_every_host_calls_every_other_with_its_token() -> None:
    found, agents = reach({})
    attempts, silent = found.try_all([(1000, 1010), (2000, 2010)])
    assert silent == []
    assert {attempt.result for attempt in attempts} == {"ok"}
    assert {(one.source, one.target, one.port) for one in attempts} == {
        (f"node{a}", f"node{b}", port) for a in range(3) for b in range(3) if a != b for port in (1001, 2001, SSH_PORT)
    }
    assert len({agents["node0"].listening[f"10.0.0.{n + 1}", 1001] for n in range(3)}) == 3


def test_hosts_that_do_not_answer_are_told_and_the_others_go_on() -> None:
    found, _ = reach({"node1": "listen", "node2": "connect"})
    attempts, silent = found.try_all([(1000, 1010)])
    assert silent == ["node1", "node2"]
    assert {(one.source, one.target) for one in attempts} == {("node0", "node2")}


def test_the_rate_is_that_of_an_open_way_which_is_not_ssh() -> None:
    found, agents = reach({})
    attempts, _ = found.try_all([(1000, 1010)])
    assert found.tcp_bits_per_second("node0", "node2") == 1e9
    (asked,) = agents["node0"].streamed
    assert (asked["address"], asked["port"]) == ("10.0.0.3", 1001)
    assert asked["token_bytes"] == len(agents["node0"].listening["10.0.0.3", 1001])
    found._attempts = [dataclasses.replace(one, result="silent" if one.port != SSH_PORT else "ok") for one in attempts]
    assert found.tcp_bits_per_second("node0", "node2") is None
    mute, _ = reach({"node0": "stream"})
    mute.try_all([(1000, 1010)])
    assert mute.tcp_bits_per_second("node0", "node2") is None
