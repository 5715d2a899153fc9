"""Small functions of `horovod.tensorflow.util`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Local: whether operations run at once."""
    return bool(tf.executing_eagerly())


def vars_to_refs(variables: Any) -> Any:
    """Local: references, which can be hashed, in the place of variables; lists become tuples."""
    return tuple(map(vars_to_refs, variables)) if isinstance(variables, list) else variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """Local: the variables again."""
    return [refs_to_vars(ref) for ref in refs] if isinstance(refs, tuple) else refs.deref()
