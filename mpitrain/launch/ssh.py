"""The ssh command line for one host: it never asks for anything, and what it hands to a shell is quoted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.runtime.hostfile import NAME

# Where the MPIs look for another program than ssh: Open MPI 5 and 4, MPICH, Intel MPI. The first that is set is used.
AGENT_VARIABLES = (
    "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_rsh_agent",
    "HYDRA_LAUNCHER_EXEC",
    "I_MPI_HYDRA_BOOTSTRAP_EXEC",
)
CONNECT_TIMEOUT_SECONDS = 10
# A host that falls silent is given up after three unanswered questions.
ALIVE_INTERVAL_SECONDS, ALIVE_COUNT = 3, 3


@dataclass(frozen=True)
class Ssh:
    """How other hosts are reached."""

    program: tuple[str, ...] = ("ssh",)  # ssh, or what the user has in its place, with arguments of its own
    port: int | None = None  # of the hosts' sshd, if not what ssh is configured for
    identity_file: str | None = None  # private key, if not what ssh is configured for
    connect_timeout_seconds: int = CONNECT_TIMEOUT_SECONDS  # after which a host that does not answer is given up

    def __post_init__(self) -> None:
        if not self.program or self.program[0].startswith("-"):
            raise UsageError(f"{shlex.join(self.program)!r} is no program to reach hosts with: name ssh, or a path")
        if self.port is not None and not 0 < self.port < 65536:
            raise UsageError(f"the ssh port is {self.port}: it must be between 1 and 65535")
        if self.connect_timeout_seconds < 1:
            raise UsageError(f"the connect timeout is {self.connect_timeout_seconds} s: it must be at least 1")
        if self.identity_file is not None and not self.identity_file.strip():
            raise UsageError("the ssh identity file has no name: give its path, or leave it out")
        if not self.is_ssh and (self.port is not None or self.identity_file is not None):
            raise UsageError(
                f"a port and an identity file are ssh's, and hosts are reached with {self.program[0]}: "
                "leave them out, or let that program know them"
            )

    @property
    def is_ssh(self) -> bool:
        """Whether the program takes the options of ssh: ssh itself, or a wrapper named after it (`my-ssh`)."""
        return Path(self.program[0]).stem.endswith("ssh")

    @property
    def options(self) -> tuple[str, ...]:
        """The options, without host and command; none for a program that is not ssh."""
        if not self.is_ssh:
            return ()
        settings = {
            "BatchMode": "yes",  # an error instead of a question for a password or a host key
            "ConnectTimeout": self.connect_timeout_seconds,
            "ServerAliveInterval": ALIVE_INTERVAL_SECONDS,
            "ServerAliveCountMax": ALIVE_COUNT,
        }
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return tuple(words)

    @property
    def line(self) -> str:
        """Program and options, quoted for a shell; with them alone the same Ssh can be made."""
        return quoted([*self.program, *self.options])

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """What to execute here, without a shell, for `words` to be executed on `host`.

        The words are quoted for the shell that ssh starts on the host.

        Raises:
            UsageError: `host` is no name of a host, or a word cannot be handed on.
        """
        return [*self.program, *self.options, check_host(host), quoted(words)]


def from_environment(
    environ: Mapping[str, str],
    port: int | None = None,
    identity_file: str | None = None,
    connect_timeout_seconds: int = CONNECT_TIMEOUT_SECONDS,
) -> Ssh:
    """Ssh with the program that the user has set for the MPI, if any.

    Raises:
        UsageError: a setting cannot be.
    """
    value = next((environ[name] for name in AGENT_VARIABLES if environ.get(name, "").strip()), "ssh")
    # Open MPI takes a list of programs, `ssh : rsh`, and uses the first that is installed.
    words = re.split(r"(?:^|\s):(?:\s|$)", value)[0].split()
    return Ssh(tuple(words or ["ssh"]), port, identity_file, connect_timeout_seconds)


def check_host(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: it is no name of a host: ssh might take it for an option, or a shell for a command.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a host: letters, digits, '.', '-' and '_' make one")
    return name


def quoted(words: Sequence[str]) -> str:
    """The words as one line, which a shell takes apart into just these words.

    Raises:
        UsageError: a word holds a NUL, which no program can be given.
    """
    for word in words:
        if "\0" in word:
            raise UsageError(f"{word!r} holds a NUL character, which cannot be handed to a program")
    return shlex.join(words)
