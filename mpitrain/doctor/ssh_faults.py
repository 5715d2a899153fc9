"""Why a host could not be asked, from what ssh says. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpitrain.doctor.finding import Finding

CHECK = "ssh"
_KNOWN_HOSTS = "ssh-keyscan -H {host} >> ~/.ssh/known_hosts"
# The first that is found decides: a refused key comes after the reason why it was not used.
_FAULTS = (
    (
        r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
        "the name does not resolve to an address",
        "correct the name in the list of hosts, or make `getent hosts {host}` answer (DNS or /etc/hosts)",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that was known: reinstalled, or another machine",
        "if that is expected: ssh-keygen -R {host}; " + _KNOWN_HOSTS,
    ),
    (
        r"Host key verification failed|host key is known",
        "its host key is unknown, and ssh would ask whether to trust it",
        _KNOWN_HOSTS,
    ),
    (
        r"UNPROTECTED PRIVATE KEY FILE",
        "ssh does not use a private key that others can read, and nobody is let in without",
        "chmod 600 ~/.ssh/id_*",
    ),
    (
        r"Permission denied|Too many authentication failures|No supported authentication methods",
        "ssh wants a password, or another key ({detail})",
        "ssh-copy-id {host}",
    ),
    (
        r"Connection refused",
        "its ssh port refuses connections: sshd is down, or listens on another port",
        "on {host}: sudo systemctl enable --now ssh (sshd on Red Hat), or give its port in ~/.ssh/config",
    ),
    (
        r"No route to host|Network is unreachable",
        "there is no route to it",
        "ip route get $(getent hosts {host} | cut -d' ' -f1)",
    ),
    (
        r"timed out",
        "its ssh port does not answer: the host is down, or a firewall drops ssh",
        "ping -c 3 {host}; on {host}: sudo ufw allow ssh, or firewall-cmd --add-service=ssh",
    ),
    (
        r"kex_exchange_identification|Connection (?:closed|reset)",
        "sshd ends the connection at once: MaxStartups, hosts.deny, or a broken sshd",
        "on {host}: sudo journalctl -u ssh -n 20",
    ),
    (
        r"python3: (?:command )?not found|python3: No such file",
        "there is no Python",
        "install Python and mpitrain on {host} at the same paths as here",
    ),
)


@dataclass(frozen=True)
class Unanswered(Exception):  # noqa: N818 - what happened, not whose error it is
    """An agent did not answer."""

    words: str  # what ssh or the agent wrote to standard error
    seconds: float | None = None  # how long it was waited for, if that is why


def diagnose(host: str, failure: Unanswered) -> Finding:
    """What is wrong with the way to a host."""
    for sign, sentence, remedy in _FAULTS:
        if re.search(sign, failure.words):
            detail = re.search(r"Permission denied \(([\w,-]+)\)", failure.words)
            words = {"host": host, "detail": f"it takes {detail.group(1)}" if detail else "it refuses ours"}
            return Finding(CHECK, (host,), "red", sentence.format(**words), remedy.format(**words))
    return Finding(CHECK, (host,), "red", *_unknown(failure, f"ssh -v -o BatchMode=yes {host} true"))


def diagnose_srun(host: str, failure: Unanswered) -> Finding:
    """The same for a host of a Slurm allocation, which is reached by srun."""
    remedy = f"srun --overlap --nodes=1 --ntasks=1 --nodelist={host} hostname; sinfo --nodes={host} --long"
    return Finding("srun", (host,), "red", *_unknown(failure, remedy))


def _unknown(failure: Unanswered, remedy: str) -> tuple[str, str]:
    last = (failure.words.strip().splitlines() or ["no message"])[-1].strip()[:200]
    if failure.seconds is not None:
        return f"did not answer within {failure.seconds:.0f} s ({last})", remedy
    return f"no command can be run there: {last}", remedy
