"""Real connections between the agents of all hosts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpitrain.doctor import network
from mpitrain.doctor.connection import Agent, ask_all
from mpitrain.doctor.facts import Facts
from mpitrain.doctor.network import Attempt
from mpitrain.doctor.ssh_faults import Unanswered

LISTEN_SECONDS = 3.0
WAY_SECONDS = 3.0  # after which a connection is taken for lost
ANSWER_SECONDS = 2.0  # more, for the agent to say so
STREAM_SECONDS = 0.4


class Reach:
    """Agents that listen, and call each other."""

    def __init__(self, agents: Mapping[str, Agent], facts: Mapping[str, Facts]) -> None:
        self._agents, self._facts = agents, facts
        self._tokens = {name: secrets.token_hex(8) for name in agents}
        self._attempts: list[Attempt] = []

    def try_all(self, ranges: Sequence[tuple[int, int]]) -> tuple[list[Attempt], list[str]]:
        """Local: every host calls every other.

        Returns:
            What came of it, and the hosts that did not answer any more.
        """
        listening = ask_all(lambda name: self._listen(name, ranges), self._agents, LISTEN_SECONDS)
        ports = {name: found for name, found in listening.items() if not isinstance(found, Unanswered)}
        planned = network.plan({name: self._facts[name] for name in ports}, ports)
        results = ask_all(lambda name: self._call(name, planned), ports, WAY_SECONDS + ANSWER_SECONDS)
        self._attempts = [attempt for found in results.values() if isinstance(found, list) for attempt in found]
        return self._attempts, [name for name in self._agents if not isinstance(results.get(name), list)]

    def tcp_bits_per_second(self, source: str, target: str) -> float | None:
        """Local: what TCP gets from one host to another, on a way that was found open; None if that fails."""
        ways = (one for one in self._attempts if (one.source, one.target) == (source, target))
        # sshd would end a stream that is none of its protocol.
        way = next((one for one in ways if one.result == "ok" and one.port != network.SSH_PORT), None)
        if way is None:
            return None
        try:
            answer = self._agents[source].ask(
                "stream",
                STREAM_SECONDS + ANSWER_SECONDS,
                address=way.address,
                port=way.port,
                token_bytes=len(self._tokens[target]),
                send_seconds=STREAM_SECONDS,
            )
        except Unanswered:
            return None
        found: float | None = answer["bits_per_second"]
        return found

    def _listen(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[int]:
        answer = self._agents[name].ask("listen", LISTEN_SECONDS, token=self._tokens[name], ranges=ranges)
        return [port for port in answer["ports"] if port]

    def _call(self, name: str, planned: Sequence[Attempt]) -> list[Attempt]:
        mine = [attempt for attempt in planned if attempt.source == name]
        targets = [(one.address, one.port, self._token(one)) for one in mine]
        answer = self._agents[name].ask(
            "connect", WAY_SECONDS + ANSWER_SECONDS, targets=targets, wait_seconds=WAY_SECONDS
        )
        return [replace(attempt, result=result) for attempt, result in zip(mine, answer["results"], strict=True)]

    def _token(self, attempt: Attempt) -> str:
        # sshd speaks first, and knows nothing of tokens.
        return "" if attempt.port == network.SSH_PORT else self._tokens[attempt.target]
