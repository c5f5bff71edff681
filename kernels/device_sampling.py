"""Sampling on the logits' device: `choose` and `token_logprobs` with tensor arguments and results.

`kernels/sampling.py` specifies both, and computes them where Triton does not. With Triton
(`gpu/sampling.py`, `gpu/logprobs.py`) nothing is read back, so a step can be captured in a graph,
and logits are not changed.

Legend: R rows, V vocabulary, K of the top.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from remora.kernels import sampling
from remora.kernels.dispatch import by_triton
from remora.kernels.sampling import ALL_BANNED, NO_FAULT, NOT_FINITE

SKIPPED = -1.0  # temperature of a row without a token


def choose_on_device(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Choose one id per row; return the ids, and below them the rows' faults, [2, R] int64.

    logits:       [R, V] float32, each row contiguous; may be overwritten
    temperature:  [R] float32; 0 = greedy, below 0 = the row is skipped: id and fault are 0
    keys:         [R] int64, 64 random bits; not read for greedy rows
    top_k:        [R] int64; 0 = off
    top_p:        [R] float64; 1 = off
    min_p:        [R] float32; 0 = off

    Ids equal those of `sampling.choose` unless two tokens' times in the race, or a token and the
    boundary of a filter, are so close that rounding decides. A row with NaN or infinity is
    NOT_FINITE, and a row of -inf only is ALL_BANNED; the id of such a row is any token's.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import sampling as kernels

        return kernels.choose(logits, temperature, keys, top_k, top_p, min_p)
    heat = temperature.cpu().numpy()
    ids, is_good = sampling.choose(
        logits,
        heat,
        keys.cpu().numpy(),
        top_k=top_k.cpu().numpy(),
        top_p=top_p.cpu().numpy(),
        min_p=min_p.cpu().numpy(),
    )
    chosen = np.stack((ids.clip(0, logits.shape[1] - 1), np.full_like(ids, NO_FAULT)))
    for row in (~is_good).nonzero()[0].tolist():
        chosen[1, row] = ALL_BANNED if bool(logits[row].isneginf().all()) else NOT_FINITE
    chosen[:, heat < 0] = 0
    return torch.from_numpy(chosen).to(logits.device)


def token_logprobs_on_device(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of the chosen tokens and of the likeliest ones.

    logits:     [R, V] float32, each row contiguous; not changed
    token_ids:  [R] int64

    Returns the tokens' log-probabilities [R] float32 and ranks [R] int32 (1 = no logit is greater),
    and the ids [R, K] int64 and log-probabilities [R, K] float32 of the K = min(num_top, V)
    likeliest, lower ids first among equals. Results are undefined for rows with a NaN or an
    infinity, and for places of the top for which only logits of -inf remain.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import logprobs as kernels

        return kernels.token_logprobs(logits, token_ids, min(num_top, logits.shape[1]))
    described = sampling.token_logprobs(logits, token_ids.cpu().numpy(), num_top)
    logprobs, ranks, top_ids, top_logprobs = (
        torch.from_numpy(each).to(logits.device) for each in described
    )
    return logprobs, ranks, top_ids, top_logprobs
