"""Horovod's names for scripts that use them: `import mpitrain.horovod.tensorflow as hvd`.

What is supported, what differs and what is absent stands in docs/horovod.md.
"""

__version__ = "0.28.1"  # of Horovod, whose names these are
