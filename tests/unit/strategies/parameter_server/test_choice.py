"""What a server computes on."""

from __future__ import annotations

import pytest

from mpitrain.strategies.parameter_server.choice import device_of
from mpitrain.strategies.parameter_server.options import ServerOptions


@pytest.mark.parametrize(
    ("servers", "rank", "expected"),
    [
        (None, "0", "gpu"),
        ("1", "0", "cpu"),
        ("1", "1", "gpu"),
        ("2", "1", "cpu"),
        ("2", None, "gpu"),
        ("colocated", "0", "gpu"),
        ("none", "0", "gpu"),  # which is refused later
    ],
)
def test_a_server_takes_no_gpu(
    servers: str | None, rank: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(f"OMPI_COMM_WORLD_{name}", raising=False)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert device_of(None if servers is None else ServerOptions(servers), "gpu") == expected
