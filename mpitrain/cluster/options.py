"""Who may connect to TensorFlow's own servers."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.config import option


@dataclass(frozen=True)
class NetworkOptions:
    """Of what starts servers: nobody but this host, unless one of these is given."""

    bind: str | None = option(None, "let hosts of these networks connect, as in 10.0.0.0/24", metavar="NETWORKS")
    insecure_network: bool = option(False, "let everybody connect, without a password")
