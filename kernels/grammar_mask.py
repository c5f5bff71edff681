"""Logits of tokens that a constraint does not allow become -inf.

The specification; `cpu/src/sampling.cpp` holds the native one, `gpu/logit_edits.py` the kernel for
a GPU. Knows nothing of grammars.

Legend: R rows, V vocabulary, G restricted rows, W = ceil(V / 32) words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.memory import to_device


def mask_tokens(logits: Tensor, lines: npt.NDArray[np.int64], words: npt.NDArray[np.int32]) -> None:
    """Take -inf from the logits that are not allowed, in place. A NaN stays one, to be noticed.

    logits:  [R, V] float32
    lines:   [G] the rows that are restricted, each at most once
    words:   [G, W] bit i of a row's words, from the lowest of the first on, allows token i
    """
    if by_triton(logits.device):
        there = (to_device(each, logits.device) for each in (lines, words))
        mask_tokens_on_device(logits, *there)
        return
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    is_banned = torch.from_numpy(bits == 0).to(logits.device)
    index = torch.from_numpy(lines).to(logits.device)
    logits[index] += torch.where(is_banned, -torch.inf, 0.0)


def mask_tokens_on_device(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """Do the same by lines [G] int64 and words [G, W] int32 that are on the logits' device.

    On a GPU with triton nothing waits, and lines below 0 are passed over, so that a captured launch
    may have as many as a step needs at most.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import logit_edits

        logit_edits.mask_tokens(logits, lines, words)
    else:
        mask_tokens(logits, lines.cpu().numpy(), words.cpu().numpy())
