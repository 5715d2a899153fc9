"""How the work of a script is divided. No TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpitrain.training.loss_shares import LossIs


@dataclass(frozen=True)
class WorkDivision:
    """How the work of a script is divided among the ranks."""

    batch_is_global: bool = False  # batch sizes in the script are those of all ranks together, not of each
    divide_loops: bool = False  # divide also what loops of the script's own read of `tf.data`
    dry_run: bool = False  # stop where the script would train, and print what would be changed
    # what a loss is that Keras does not compute: `mean`, `sum` or `whole`, see `loss_shares.Shares`
    loss_is: LossIs = "mean"
    sync_batch_norm: bool = False  # batch normalization uses the moments of all ranks' rows
