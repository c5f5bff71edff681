"""Pure functions from the output of a pooling model to embeddings and scores."""

from __future__ import annotations

import numpy as np

from remora.engine.types import FloatArray


def vector_of(numbers: FloatArray, *, normalize: bool, dimensions: int | None = None) -> FloatArray:
    """Return an embedding, cut to its first `dimensions` and then normalized to length 1."""
    vector = numbers if dimensions is None else numbers[:dimensions]
    if not normalize:
        return vector
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    normal: FloatArray = vector / np.maximum(length, np.float32(1e-12))
    return normal


def scores_of(numbers: FloatArray, activation: str) -> FloatArray:
    """Apply an activation to the logits [size] or [n, size] of a classifier."""
    values = numbers.astype(np.float64)
    if activation == "sigmoid":
        values = np.where(
            values >= 0, 1 / (1 + np.exp(-np.abs(values))), 1 - 1 / (1 + np.exp(-np.abs(values)))
        )
    elif activation == "softmax":
        values = np.exp(values - values.max(axis=-1, keepdims=True))
        values /= values.sum(axis=-1, keepdims=True)
    return values.astype(np.float32)
