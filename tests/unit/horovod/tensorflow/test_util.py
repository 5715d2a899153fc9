"""References in the place of variables."""

from __future__ import annotations

import tensorflow as tf

from mpitrain.horovod.tensorflow import util


def test_references_lead_back() -> None:
    one, other = tf.Variable(1.0), tf.Variable(2.0)
    refs = util.vars_to_refs([one, [other, one]])
    assert len({refs, util.vars_to_refs([one, [other, one]])}) == 1, "they can be hashed, and are the same"
    back = util.refs_to_vars(refs)
    assert back[0] is one
    assert back[1][0] is other
    assert util._executing_eagerly()
