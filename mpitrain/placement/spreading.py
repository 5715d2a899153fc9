"""Which of several parameter servers holds a variable. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

By = Literal["bytes", "round_robin"]
Choice = Callable[[int], int]  # from the bytes of the next variable to the number of its server


def choice(servers: int, by: By = "bytes") -> Choice:
    """Local: a rule that remembers what it has given to whom.

    Args:
        servers: how many there are.
        by: `round_robin` takes them in turn. `bytes` takes the one that holds least so far, of equals that with
            fewer variables, of these the first; as with Graham's list scheduling (1969), the fullest holds at most
            2 - 1/n times what it must.

    Raises:
        ValueError: no servers, or no such rule.
    """
    if servers < 1 or by not in ("bytes", "round_robin"):
        raise ValueError(f"{servers} servers by {by!r}: expected one or more, by bytes or round_robin")
    held = [(0, 0)] * servers  # bytes and variables

    def next_server(nbytes: int) -> int:
        load = [(0, count) for _, count in held] if by == "round_robin" else held
        found = load.index(min(load))
        held[found] = (held[found][0] + nbytes, held[found][1] + 1)
        return found

    return next_server


def spread(sizes: Sequence[int], servers: int, by: By = "bytes") -> list[int]:
    """Local: the server of each variable.

    Args:
        sizes: bytes of the variables, in the order in which they are made.
        servers: how many there are.
        by: see `choice`.

    Example:
        >>> mpitrain.placement.spread([100, 10, 10, 10], servers=2)
        [0, 1, 1, 1]
    """
    rule = choice(servers, by)
    return [rule(nbytes) for nbytes in sizes]
