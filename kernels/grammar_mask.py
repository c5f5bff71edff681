"""Sets logits of tokens that a constraint disallows to -inf.

Specifies the native implementation in `cpu/src/sampling.cpp` and the Triton kernel of
`gpu/logit_edits.py`. Knows nothing of grammars.

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
    """Set disallowed logits to -inf, in place. A NaN stays NaN, so that it is detected.

    logits:  [R, V] float32
    lines:   [G] restricted rows, each at most once
    words:   [G, W] bit mask of each row, lowest bit of the first word first; 1 allows the token
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
    """Do the same for lines [G] int64 and words [G, W] int32 on the logits' device.

    With Triton the call does not wait and skips lines below 0, so that a captured launch can have
    the largest number of lines of any step.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import logit_edits

        logit_edits.mask_tokens(logits, lines, words)
    else:
        mask_tokens(logits, lines.cpu().numpy(), words.cpu().numpy())
