"""Logits of tokens that a constraint does not allow become -inf.

The specification; `cpu/src/sampling.cpp` holds the native one. Knows nothing of grammars.

Legend: R rows, V vocabulary, G restricted rows, W = ceil(V / 32) words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def mask_tokens(logits: Tensor, lines: npt.NDArray[np.int64], words: npt.NDArray[np.int32]) -> None:
    """Take -inf from the logits that are not allowed, in place. A NaN stays one, to be noticed.

    logits:  [R, V] float32
    lines:   [G] the rows that are restricted, each at most once
    words:   [G, W] bit i of a row's words, from the lowest of the first on, allows token i
    """
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    is_banned = torch.from_numpy(bits == 0).to(logits.device)
    index = torch.from_numpy(lines).to(logits.device)
    logits[index] += torch.where(is_banned, -torch.inf, 0.0)
