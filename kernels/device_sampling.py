"""Sampling that never leaves the device: `choose` and `token_logprobs` of tensors, into tensors.

What they mean is said in `kernels/sampling.py`, on which they fall back where there are no kernels.
On a GPU with triton (`gpu/sampling.py`, `gpu/logprobs.py`) nothing waits and nothing is read back,
so that a step may be captured in a graph, and logits are not changed.

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
    """Choose one id per row [R] int64; also returns whether the row is good [R] bool.

    logits:       [R, V] float32, rows in one piece each; may be overwritten
    temperature:  [R] float32; 0 = greedy
    uniforms:     [R] float64 in [0, 1); of rows that draw
    top_k:        [R] int64; 0 = off
    top_p:        [R] float64; 1 = off
    min_p:        [R] float32; 0 = off

    Ids are those of `sampling.choose`, but where a number lies so close to the boundary of two
    tokens that the rounding of sums decides; the id of a row that is not good means nothing.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import sampling as kernels

        num_rows, device = len(logits), logits.device
        ids = torch.empty(num_rows, dtype=torch.int64, device=device)
        is_good = torch.empty(num_rows, dtype=torch.bool, device=device)
        kernels.choose(
            logits,
            temperature,
            uniforms,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            ids=ids,
            is_good=is_good,
        )
        return ids, is_good
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
    """Describe the chosen tokens [R] and the most likely ones of softmax(logits).

    logits:     [R, V] float32, rows in one piece each; not changed
    token_ids:  [R] int64

    Returns the tokens' log-probabilities [R] float32 and ranks [R] int32 (1 = no logit is greater),
    and the ids [R, K] int64 and log-probabilities [R, K] float32 of the K = min(num_top, V)
    likeliest, lower ids first among equals. Of rows with a NaN or an infinity they mean nothing; so
    do places of the top for which only logits of -inf are left.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import logprobs as kernels

        num_rows, vocab_size = logits.shape
        device, num_top = logits.device, min(num_top, vocab_size)
        logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=device)
        top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
        top_logprobs = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
        kernels.describe(
            logits,
            token_ids,
            logprobs=logprobs,
            ranks=ranks,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )
        return logprobs, ranks, top_ids, top_logprobs
    described = sampling.token_logprobs(logits, token_ids.cpu().numpy(), num_top)
    logprobs, ranks, top_ids, top_logprobs = (
        torch.from_numpy(each).to(logits.device) for each in described
    )
    return logprobs, ranks, top_ids, top_logprobs
