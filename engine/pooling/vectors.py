"""From what a pooling model gives to what a caller gets: embeddings and scores. Pure."""

from __future__ import annotations

import numpy as np

from remora.engine.types import FloatArray


def vector_of(numbers: FloatArray, *, normalize: bool, dimensions: int | None = None) -> FloatArray:
    """Return an embedding, cut to its first `dimensions` and then brought to length 1."""
    vector = numbers if dimensions is None else numbers[:dimensions]
    if not normalize:
        return vector
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    normal: FloatArray = vector / np.maximum(length, np.float32(1e-12))
    return normal


def scores_of(numbers: FloatArray, activation: str) -> FloatArray:
    """Return what the numbers of a classifier mean: [size], or [n, size] of each by itself."""
    values = numbers.astype(np.float64)
    if activation == "sigmoid":
        values = np.where(
            values >= 0, 1 / (1 + np.exp(-np.abs(values))), 1 - 1 / (1 + np.exp(-np.abs(values)))
        )
    elif activation == "softmax":
        values = np.exp(values - values.max(axis=-1, keepdims=True))
        values /= values.sum(axis=-1, keepdims=True)
    return values.astype(np.float32)
