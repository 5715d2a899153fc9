"""One rank: nothing is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.strategies.strategy import Strategy, Update


class Local(Strategy):
    """Gradients are applied as they are."""

    exchanges = False

    def update(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> Any:
        return update.apply(gradients, variables)
