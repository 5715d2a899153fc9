"""Horovod's names for scripts that use them: `import mpitrain.horovod.tensorflow as hvd`.

What is supported, what differs and what is absent stands in docs/horovod.md.
"""

from mpitrain.horovod.runner import run

__all__ = ["__version__", "run"]
__version__ = "0.28.1"  # of Horovod, whose names these are
