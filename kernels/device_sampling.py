"""Sampling on the logits' device: `choose` and `token_logprobs` with tensor arguments and results.

`kernels/sampling.py` specifies both, and computes them where Triton does not. With Triton
(`gpu/sampling.py`, `gpu/logprobs.py`) nothing is read back, so a step can be captured in a graph,
and logits are not changed.

Legend: R rows, V vocabulary, K of the top.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels import sampling
from remora.kernels.dispatch import by_triton


def choose_on_device(
    logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    """Choose one id per row [R] int64; also return whether the row is good [R] bool.

    logits:       [R, V] float32, each row contiguous; may be overwritten
    temperature:  [R] float32; 0 = greedy
    uniforms:     [R] float64 in [0, 1); not read for greedy rows
    top_k:        [R] int64; 0 = off
    top_p:        [R] float64; 1 = off
    min_p:        [R] float32; 0 = off

    Ids equal those of `sampling.choose` unless a uniform lies so close to the boundary of two
    tokens that the rounding of sums decides. The id of a row that is not good is undefined.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import sampling as kernels

        return kernels.choose(logits, temperature, uniforms, top_k, top_p, min_p)
    chosen, good = sampling.choose(
        logits,
        temperature.cpu().numpy(),
        uniforms.cpu().numpy(),
        top_k=top_k.cpu().numpy(),
        top_p=top_p.cpu().numpy(),
        min_p=min_p.cpu().numpy(),
    )
    return torch.from_numpy(chosen).to(logits.device), torch.from_numpy(good).to(logits.device)


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
