"""Gradient tapes with Horovod's arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mpitrain.horovod.basics import Average
from mpitrain.horovod.compression import Compression
from mpitrain.horovod.gradients import LocalVariables, Options, exchange_for
from mpitrain.horovod.optimizers import check_groups
from mpitrain.horovod.process_sets import ProcessSet, global_process_set
from mpitrain.training.tape import DistributedGradientTape as ExchangingTape

Pairs = list[tuple[Any, Any]]


class Tape:
    """A tape whose gradients are those of all ranks; everything else is the tape's own."""

    def __init__(self, tape: tf.GradientTape, options: Options, synchronize: bool) -> None:
        exchange = exchange_for(options)
        self._tape: Any = tape
        self.local = LocalVariables()  # variables that are this rank's own
        if exchange is not None:
            self.local = exchange.local
            self._tape = ExchangingTape(tape, exchange=exchange, synchronize_first=synchronize)

    def register_local_source(self, source: Any) -> None:
        """Local: the gradient of this variable stays each rank's own."""
        self.local.add(source)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False) -> Any:
        """Collective: gradients of `target`, those of all ranks."""
        return self._tape.gradient(target, sources, output_gradients)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[Pairs, Pairs]:
        """Collective: pairs of a source and its gradient, those of local sources and those of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if pair[0] in self.local]
        return local, [pair for pair in pairs if pair[0] not in self.local]

    def __enter__(self) -> Tape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


def DistributedGradientTape(  # noqa: N802 (Horovod's)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: a tape whose gradients are those of all ranks of a process set, by default their mean."""
    check_groups(num_groups, groups)
    options = Options(op, compression, sparse_as_dense, gradient_predivide_factor, scale_local_gradients, process_set)
    return Tape(gradtape, options, synchronize=process_set.process_set_id == 0)


def PartialDistributedGradientTape(  # noqa: N802 (Horovod's)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Local: as `DistributedGradientTape`; the gradients of `local_layers` stay each rank's own.

    Ranks start from the values they have: what is to be the same on all is broadcast by the script, as under Horovod.
    """
    check_groups(num_groups, groups)
    options = Options(op, compression, sparse_as_dense, gradient_predivide_factor, scale_local_gradients, process_set)
    tape = Tape(gradtape, options, synchronize=False)
    tape.local.add_layers(local_layers)
    return tape
