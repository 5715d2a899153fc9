"""The ssh command line: never a question, never a shell that reads more than it should."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import UsageError
from mpitrain.launch.ssh import Ssh, check_host, from_environment, quoted


def test_the_command() -> None:
    ssh = Ssh(port=2222, identity_file="/keys/my key", connect_timeout_seconds=4)
    command = ssh.command("node1", ["echo", "a b", "$HOME"])
    assert command[:-2] == [
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=4"),
        *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3", "-p", "2222", "-i", "/keys/my key"),
    ]
    assert command[-2:] == ["node1", "echo 'a b' '$HOME'"]


@pytest.mark.parametrize(
    ("environ", "program"),
    [
        ({}, ("ssh",)),
        ({"PRTE_MCA_plm_ssh_agent": ""}, ("ssh",)),
        ({"PRTE_MCA_plm_ssh_agent": "ssh : rsh"}, ("ssh",)),
        ({"PRTE_MCA_plm_ssh_agent": "/opt/my-ssh -F file"}, ("/opt/my-ssh", "-F", "file")),
        ({"PRTE_MCA_plm_ssh_agent": "ssh -o Host=a:b"}, ("ssh", "-o", "Host=a:b")),
        ({"OMPI_MCA_plm_rsh_agent": "rsh"}, ("rsh",)),
        ({"HYDRA_LAUNCHER_EXEC": "/opt/ssh"}, ("/opt/ssh",)),
        ({"I_MPI_HYDRA_BOOTSTRAP_EXEC": "/opt/ssh.sh"}, ("/opt/ssh.sh",)),
        ({"HYDRA_LAUNCHER_EXEC": "/b", "PRTE_MCA_plm_ssh_agent": "/a"}, ("/a",)),
    ],
)
def test_the_users_program(environ: dict[str, str], program: tuple[str, ...]) -> None:
    assert from_environment(environ).program == program


@pytest.mark.parametrize(("program", "takes"), [("ssh", True), ("/x/my-ssh", True), ("a/ssh.sh", True), ("rsh", False)])
def test_only_ssh_is_given_its_options(program: str, takes: bool) -> None:
    assert ("BatchMode=yes" in Ssh((program,)).command("a", ["true"])) == takes


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"port": 0}, "port is 0"),
        ({"port": 65536}, "port is 65536"),
        ({"program": ("rsh",), "port": 22}, "reached with rsh"),
        ({"program": ("-x",)}, "no program"),
        ({"program": ()}, "no program"),
        ({"identity_file": " "}, "identity file"),
        ({"connect_timeout_seconds": 0}, "connect timeout"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Ssh(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "", "a b", "a;b", "$(x)", "a\nb", "user@host", "a/b", "node1-", "é"]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name of a host"):
        check_host(name)


@pytest.mark.parametrize("name", ["node1", "10.0.0.7", "gpu-1.rack_2.example", "_a"])
def test_names_that_are_accepted(name: str) -> None:
    assert check_host(name) == name


def test_what_no_program_can_be_given() -> None:
    with pytest.raises(UsageError, match="NUL"):
        quoted(["a\0b"])


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
def test_a_shell_gives_the_words_back(words: list[str]) -> None:
    line = quoted(["printf", "%s\\0", *words])
    printed = subprocess.run(["sh", "-c", line], capture_output=True, check=True).stdout
    assert printed.decode().split("\0")[:-1] == words


def test_a_wrapper_gets_host_and_line(tmp_path: Path) -> None:
    wrapper = tmp_path / "ssh"
    wrapper.write_text('#!/bin/sh\nfor word; do last=$word; done\nexec sh -c "$last"\n')
    wrapper.chmod(0o755)
    command = from_environment({"HYDRA_LAUNCHER_EXEC": str(wrapper)}).command("node1", ["echo", "it's; $0"])
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "it's; $0\n"
