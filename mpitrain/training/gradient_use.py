"""What a training step of a script's own does between its loss and its optimizer, where the mean is taken.

Each rank has the gradients of its own rows. What is linear in them, such as a factor, may come before the mean.
Clipping them, or changing weights by them, may not, and nobody can do it again afterwards: so it is told.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mpitrain.runtime.keras_private import patch

KEPT = 16  # calls of a tape that are remembered where nothing is applied
LINEAR, BENT = 1, 2
ADDITIVE: tuple[str, ...] = (
    "AddN",
    "AddV2",
    "Sub",
    "Neg",
    "Cast",
    "Identity",
    "IdentityN",
    "EnsureShape",
    "StopGradient",
    "Pack",
)
ADDITIVE += ("ConcatV2", "Unpack", "Split", "SplitV", "Transpose", "Reshape", "Squeeze", "ExpandDims", "Sum", "Mean")
ADDITIVE += ("StridedSlice", "GatherV2", "UnsortedSegmentSum")
FACTORS = ("Mul", "MatMul", "RealDiv", "DivNoNan", "MulNoNan")  # linear in one of two, a divisor never
OF_SHAPE = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
# An exchange is one.
HOST_CALLS = ("PyFunc", "PyFuncStateless", "EagerPyFunc", "MpitrainExchange", "XlaCallModule")
_uses: contextvars.ContextVar[GradientUses | None] = contextvars.ContextVar("uses", default=None)


class GradientUses:
    """What becomes of the gradients that a step takes.

    Args:
        owner: what takes them, for messages.
        tell: gets a sentence.

    Attributes:
        losses: what Keras has computed as the loss.
        adds_to_losses: what was differentiated is made of these, but is none of them.
    """

    def __init__(self, owner: str, tell: Callable[[str], None]) -> None:
        self.losses: list[Any] = []
        self.adds_to_losses = False
        self._owner, self._tell = owner, tell
        self._taken: deque[tuple[list[Any], list[Any]]] = deque(maxlen=KEPT)

    def note(self, target: Any, sources: Any, gradients: Any) -> None:
        """Local: a tape gave these gradients; only those of variables are averaged over the ranks."""
        pairs = zip(keras.tree.flatten(sources), keras.tree.flatten(gradients), strict=False)
        found = [(g, s) for s, g in pairs if g is not None and isinstance(s, tf.Variable | keras.Variable)]
        if found:
            self._taken.append(([g for g, _ in found], [s for _, s in found]))
            self.adds_to_losses |= bool(self.losses) and not any(_is_scaled(target, loss) for loss in self.losses)

    def check(self, applied: Sequence[Any]) -> None:
        """Local: these go to an optimizer now; and what the step has done up to here is looked at."""
        given = [one for one in applied if one is not None]
        taken = [one for gradients, _ in self._taken for one in gradients]
        if tf.executing_eagerly():
            self._taken.clear()
            bent = any(not any(one is known for known in taken) for one in given) if taken else False
        else:
            bent = self._is_bent(given, taken)
        if bent:
            self._tell(told(self._owner))

    def _is_bent(self, given: Sequence[Any], taken: Sequence[Any]) -> bool:
        graph = tf.compat.v1.get_default_graph()
        of = {_name(one): LINEAR for one in taken if getattr(_values(one), "graph", None) is graph}  # no eager ones
        if not of:
            return False
        sources = {id(_handle(one)) for _, sources in self._taken for one in sources}
        own = {inside.name for outside, inside in graph.captures if id(outside) in sources}
        for operation in graph.get_operations():
            states = [of.get(one.name, 0) for one in operation.inputs]
            if not any(states) or operation.type in (*HOST_CALLS, *OF_SHAPE):
                continue
            if operation.type.startswith(("Assign", "Resource")):
                if BENT in states or operation.inputs[0].name in own:
                    return True
                continue
            state = LINEAR if BENT not in states and _is_linear(operation.type, states) else BENT
            of |= {one.name: max(state, of.get(one.name, 0)) for one in operation.outputs}
        return any(of.get(_name(one)) == BENT for one in given)


def told(owner: str) -> str:
    """Local: the sentence on gradients that are changed."""
    return (
        f"{owner} does more with gradients than give them to an optimizer (clips them, takes their norm, changes "
        "weights by them): each rank does so with those of its own rows, before their mean over the ranks is taken, so "
        "that it is not what the whole batch would give. Let the optimizer clip: clipnorm, global_clipnorm, clipvalue"
    )


@contextlib.contextmanager
def watching(uses: GradientUses | None) -> Iterator[None]:
    """Local: in this context `uses` is told of gradients."""
    _install()
    token = _uses.set(uses)
    try:
        yield
    finally:
        _uses.reset(token)


def keep_watching(uses: GradientUses) -> None:
    """Local: from now on `uses` is told of gradients wherever nothing else is said."""
    _install()
    _uses.set(uses)


def current_uses() -> GradientUses | None:
    """Local: what is told of gradients here."""
    return _uses.get()


def _is_linear(kind: str, states: Sequence[int]) -> bool:
    if kind in FACTORS:
        return sum(map(bool, states)) == 1 and (kind not in ("RealDiv", "DivNoNan") or bool(states[0]))
    return kind in ADDITIVE


def _is_scaled(target: Any, loss: Any) -> bool:
    """Local: whether it is that loss, or the loss times a number, as where its scale changes."""
    if target is loss or tf.executing_eagerly() or not tf.is_tensor(target):
        return target is loss
    return target.op.type == "Mul" and any(one is loss for one in target.op.inputs)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _name(gradient: Any) -> str:
    return str(getattr(_values(gradient), "name", ""))  # which eager ones have not


def _handle(variable: Any) -> Any:
    return (variable.value if isinstance(variable, keras.Variable) else variable).handle


@functools.cache
def _install() -> None:
    @tf.autograph.experimental.do_not_convert
    def gradient(original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found, uses = original(tape, target, sources, *args, **kwargs), _uses.get()
        if uses is not None:
            uses.note(target, sources, found)
        return found

    patch(tf.GradientTape, "gradient", gradient)
