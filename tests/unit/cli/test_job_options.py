"""How many ranks, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.cli.job_options import JobOptions
from mpitrain.errors import UsageError
from mpitrain.runtime.hostfile import Host


def test_hosts_are_named_in_one_way(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=4\nb slots=2\n")
    named = (Host("a", 4), Host("b", 2))
    assert JobOptions().named_hosts() == ()
    assert JobOptions(hosts="a:4,b:2").named_hosts() == named
    assert JobOptions(hostfile=str(file)).named_hosts() == named
    with pytest.raises(UsageError, match="-H and with --hostfile: give one"):
        JobOptions(hosts="a:4", hostfile=str(file)).named_hosts()
