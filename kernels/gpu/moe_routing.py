"""Triton kernel of `kernels/moe_routing.py`.

One program, of one warp, per token, with all scores in registers. It selects the best k times,
which is faster than sorting for k = 8 of 128.

Legend, and suffixes of blocks: G groups, P experts of a group, E both flat, k experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from remora.kernels.moe_rules import MIN_WEIGHT_SUM, Routing


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Do what `moe_routing.route` does."""
    tokens, experts = logits.shape
    assert logits.stride(1) == 1
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    of_group = experts // routing.num_groups
    groups, padded = triton.next_power_of_2(routing.num_groups), triton.next_power_of_2(of_group)
    if tokens > 0:
        route_kernel[(tokens,)](
            logits,
            bias,
            slots,
            ids,
            weights,
            logits.stride(0),
            TOP_K=routing.top_k,
            IS_SIGMOID=routing.is_sigmoid,
            BY_LOGITS=routing.chooses_by_logits(has_bias=bias is not None),
            IS_NORMALISED=routing.is_normalised,
            SCALING=routing.scaling,
            GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups,
            GROUP_BEST=min(routing.group_best, of_group),
            OF_GROUP=of_group,
            MIN_WEIGHT_SUM=MIN_WEIGHT_SUM,
            G=groups,
            P=padded,
            K=triton.next_power_of_2(routing.top_k),
            num_warps=1 if groups * padded <= 512 else 4,
            num_stages=1,
            enable_fp_fusion=True,
        )
    return ids, weights


@triton.jit(do_not_specialize_on_alignment=["slots"])
def route_kernel(
    logits: tl.tensor,
    bias: tl.tensor | None,
    slots: tl.tensor | None,
    ids: tl.tensor,
    weights: tl.tensor,
    logits_stride: int,
    TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    SCALING: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    OF_GROUP: tl.constexpr,
    MIN_WEIGHT_SUM: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    group_G, of_group_P = tl.arange(0, G), tl.arange(0, P)
    is_expert_GP = (group_G < GROUPS)[:, None] & (of_group_P < OF_GROUP)[None, :]
    expert_GP = group_G[:, None] * OF_GROUP + of_group_P[None, :]
    logit_GP = tl.load(
        logits + token * logits_stride + expert_GP, mask=is_expert_GP, other=float("-inf")
    ).to(tl.float32)
    if IS_SIGMOID:
        score_GP = 1.0 / (1.0 + tl.exp(-logit_GP))
    else:
        size_GP = tl.exp(logit_GP - tl.max(tl.max(logit_GP, axis=1), axis=0))
        score_GP = size_GP / tl.sum(tl.sum(size_GP, axis=1), axis=0)
    choice_GP = logit_GP if BY_LOGITS else score_GP
    if bias is not None:
        choice_GP += tl.load(bias + expert_GP, mask=is_expert_GP, other=0.0).to(tl.float32)
    choice_GP = tl.where(is_expert_GP, choice_GP, float("-inf"))
    if GROUPS > 1:
        is_chosen_G = best_groups(choice_GP, TOP_GROUPS, GROUP_BEST, G, P)
        choice_GP = tl.where(is_chosen_G[:, None], choice_GP, float("-inf"))
    choice_E, score_E = tl.reshape(choice_GP, [G * P]), tl.reshape(score_GP, [G * P])
    at_E, at_K = tl.arange(0, G * P), tl.arange(0, K)
    id_K = tl.full([K], 0, tl.int32)
    weight_K = tl.full([K], 0.0, tl.float32)
    for nth in tl.static_range(TOP_K):
        best = tl.argmax(choice_E, axis=0)
        weight = tl.sum(tl.where(at_E == best, score_E, 0.0), axis=0)
        # NaN logits have no maximum, but the id must be valid.
        expert = tl.minimum(best // P * OF_GROUP + best % P, GROUPS * OF_GROUP - 1)
        id_K = tl.where(at_K == nth, expert, id_K)
        weight_K = tl.where(at_K == nth, weight, weight_K)
        choice_E = tl.where(at_E == best, float("-inf"), choice_E)
    if IS_NORMALISED:
        weight_K /= tl.sum(weight_K, axis=0) + MIN_WEIGHT_SUM
    if slots is not None:
        is_padding = tl.load(slots + token) == 0
        id_K = tl.where(is_padding, -1, id_K)
        weight_K = tl.where(is_padding, 0.0, weight_K)
    to_K = token * TOP_K + at_K
    tl.store(ids + to_K, id_K, mask=at_K < TOP_K)
    tl.store(weights + to_K, weight_K * SCALING, mask=at_K < TOP_K)


@triton.jit
def best_groups(
    choice_GP: tl.tensor,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
) -> tl.tensor:
    """Return a mask of the groups with the best experts."""
    of_group_P, group_G = tl.arange(0, P), tl.arange(0, G)
    sum_G = tl.max(choice_GP, axis=1)
    if GROUP_BEST == 2:
        first_G = tl.argmax(choice_GP, axis=1)
        is_first_GP = of_group_P[None, :] == first_G[:, None]
        sum_G += tl.max(tl.where(is_first_GP, float("-inf"), choice_GP), axis=1)
    is_chosen_G = group_G < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(tl.where(is_chosen_G, float("-inf"), sum_G), axis=0)
        is_chosen_G = is_chosen_G | (group_G == best)
    return is_chosen_G
