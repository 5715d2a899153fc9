"""Which compressors there are."""

from __future__ import annotations

from mpitrain.reduction.compressor import Compressor, NoCompression

COMPRESSORS: dict[str, Compressor] = {"none": NoCompression()}
