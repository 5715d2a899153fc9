"""Why a host cannot be asked: what ssh says, word for word, and what is made of it."""

from __future__ import annotations

import pytest

from mpitrain.doctor.connection import by_srun
from mpitrain.doctor.ssh_faults import Unanswered, diagnose, diagnose_srun

CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key for n1 has changed and you have requested strict checking.
Host key verification failed."""
KEY_OF_ALL = """@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/home/a/.ssh/id_ed25519' are too open.
a@n1: Permission denied (publickey)."""


@pytest.mark.parametrize(
    ("words", "sentence", "remedy"),
    [
        ("ssh: Could not resolve hostname n1: Name or service not known", "does not resolve", "getent hosts n1"),
        ("ssh: Could not resolve hostname n1: Temporary failure in name resolution", "does not resolve", "DNS"),
        ("ssh: connect to host n1 port 22: Connection refused", "sshd is down", "systemctl enable --now ssh"),
        ("ssh: connect to host n1 port 22: Connection timed out", "does not answer", "ping -c 3 n1"),
        ("Connection timed out during banner exchange", "does not answer", "ping -c 3 n1"),
        ("ssh: connect to host n1 port 22: No route to host", "no route", "ip route get"),
        (
            "No ED25519 host key is known for n1 and you have requested strict checking.\nHost key verification ...",
            "host key is unknown",
            "ssh-keyscan -H n1 >> ~/.ssh/known_hosts",
        ),
        ("Host key verification failed.", "host key is unknown", "ssh-keyscan -H n1"),
        (CHANGED, "not the one that was known", "ssh-keygen -R n1"),
        (
            "a@n1: Permission denied (publickey,password).",
            "wants a password, or another key (it takes publickey,password)",
            "ssh-copy-id n1",
        ),
        ("Received disconnect from n1: Too many authentication failures", "wants a password", "ssh-copy-id n1"),
        (KEY_OF_ALL, "others can read", "chmod 600"),
        ("kex_exchange_identification: Connection closed by remote host", "ends the connection at once", "journalctl"),
        ("sh: 1: exec: python3: not found", "there is no Python", "install Python"),
        ("env: 'python3': No such file or directory", "no command can be run there: env:", "ssh -v"),
        ("something new\n", "no command can be run there: something new", "ssh -v -o BatchMode=yes n1 true"),
        ("", "no message", "ssh -v"),
    ],
)
def test_each_reason_is_told_apart(words: str, sentence: str, remedy: str) -> None:
    found = diagnose("n1", Unanswered(words))
    assert (found.check, found.colour, found.hosts) == ("ssh", "red", ("n1",))
    assert sentence in found.sentence
    assert remedy in found.remedy
    assert "{" not in found.sentence + found.remedy


def test_silence() -> None:
    assert "did not answer within 9 s" in diagnose("n1", Unanswered("", 9.0)).sentence


def test_hosts_that_srun_reaches() -> None:
    found = diagnose_srun("n1", Unanswered("srun: error: Unable to create step for job 4: Node is down\n"))
    assert (found.check, found.colour, found.hosts) == ("srun", "red", ("n1",))
    assert "Node is down" in found.sentence
    assert "srun --overlap --nodes=1 --ntasks=1 --nodelist=n1 hostname" in found.remedy
    words = by_srun("/usr/bin/srun")("n1", ["sh", "-c", "true"])
    assert words[0] == "/usr/bin/srun"
    assert words[-4:] == ["--nodelist=n1", "sh", "-c", "true"]
