"""Logits of tokens that a constraint does not allow become -inf.

The specification; `cpu/src/sampling.cpp` holds the native one. Knows nothing of grammars.

Legend: R rows, V vocabulary, G restricted rows, W = ceil(V / 32) words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WORD_BITS = 32


def mask_tokens(logits: Tensor, lines: npt.NDArray[np.int64], words: npt.NDArray[np.int32]) -> None:
    """Take -inf from the logits that are not allowed, in place. A NaN stays one, to be noticed.

    logits:  [R, V] float32
    lines:   [G] the rows that are restricted, each at most once
    words:   [G, W] bit i of a row's words, from the lowest of the first on, allows token i
    """
    index = torch.from_numpy(lines).to(logits.device)
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    masks = torch.from_numpy(words).to(logits.device)
    is_allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]] == 1
    old = logits[index]
    logits[index] = torch.where(is_allowed, old, old - torch.inf)
