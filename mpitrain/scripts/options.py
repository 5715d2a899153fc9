"""The options that may stand before an unmodified script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mpitrain.config import check_needs, flag, given_of, option, room
from mpitrain.errors import UsageError
from mpitrain.faults.options import FaultOptions
from mpitrain.runtime.options import MachineOptions
from mpitrain.strategies.options import StrategyOptions

# For scripts that do not divide their work themselves.
DIVISION = ("batch_size_is", "divide_loops", "dry_run", "loss_is", "output", "sync_batch_norm")


@dataclass(frozen=True)
class ScriptOptions:
    """How a script is run on all ranks."""

    batch_size_is: str = option("rank", "whose batch size the script names", choices=("rank", "global"))
    loss_is: Literal["mean", "sum", "whole"] | None = option(
        None,
        "a loss of the script's own: mean or sum over rows, or of a whole batch (default mean, whole under "
        "--batch-size-is global)",
        choices=("mean", "sum", "whole"),
    )
    output: str = option("mpitrain-output", "directory for rank-N.log", metavar="DIR")
    dry_run: bool = option(False, "stop at the first training, print what would change")
    divide_loops: bool = option(False, "divide the tf.data batches of the script's own loops, too")
    as_horovod: bool = option(False, "a script that imports horovod: it finds mpitrain.horovod instead")
    exchange: StrategyOptions = room(StrategyOptions)
    machine: MachineOptions = room(MachineOptions)
    faults: Mapping[str, Any] = given_of(FaultOptions)

    def check(self, given: frozenset[str]) -> None:
        """Local: whether every option that was given can act.

        Raises:
            UsageError: one would do nothing.
        """
        check_needs(self, given)
        servers = self.exchange.servers is not None
        if servers and self.loss_is not in (None, "mean"):
            raise UsageError("--loss-is: parameter servers average gradients, weighted by rows: leave it out, or them")
        if not self.as_horovod:
            return
        if servers:
            raise UsageError("--as-horovod averages gradients by all-reduce: leave out --strategy ps")
        unused = next((name for name in DIVISION if name in given), None)
        if unused is not None:
            raise UsageError(
                f"{flag(unused)} does nothing with --as-horovod, for such a script divides its work itself: leave it "
                "out"
            )
