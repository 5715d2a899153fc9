"""Variables of eager programs and Keras models on devices of one's own choice, of two that the CPU is divided into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import keras
import tensorflow as tf
from mpitrain.placement import variables_on

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
calls = []

def start():
    calls.append(1)
    return tf.zeros([10], tf.float64)

def places(by):
    with variables_on(["/CPU:0", "/CPU:1"], by=by):
        layer = keras.layers.Dense(4)
        made = [tf.Variable(start), tf.Variable([1.0, 2.0]), tf.Variable(tf.zeros([3]), shape=[None], dtype=tf.float32)]
        layer.build((None, 25))
    return "".join(variable.device[-1] for variable in [*made, *(weight.value for weight in layer.weights)])

print(places("round_robin"), places("bytes"), len(calls))
"""


def test_variables_are_spread() -> None:
    """By bytes: 80 to the first; 8, 12 and then 400 to the second, which held less; 16 to the first."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
        timeout=300,
    )
    assert done.stdout == "01010 01110 2\n", done.stdout + done.stderr
