"""Small functions of `horovod.runner`."""
