"""Settings of unit tests, made before TensorFlow is imported."""

from __future__ import annotations

import os

# Ranks that are threads share TensorFlow's pool, in which each of them may wait for the others.
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "8")
