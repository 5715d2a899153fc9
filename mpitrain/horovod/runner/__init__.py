"""What scripts import from `horovod.runner`: `run` says what takes its place; hosts are read as `horovodrun` does."""

from mpitrain.horovod.runner.interactive import run

__all__ = ["run"]
