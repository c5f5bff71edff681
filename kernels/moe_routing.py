"""Routing: the experts of each token and their weights.

Supports softmax and sigmoid scores, a bias of the choice that does not affect weights (DeepSeek-V3,
arXiv:2412.19437), choice within the best groups of experts (DeepSeek-V2, arXiv:2405.04434), and
normalised weights. Knows no weights of experts.

Legend: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.moe_rules import MIN_WEIGHT_SUM, Routing


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts.

    logits:  [T, E] of any float type, each row contiguous
    bias:    [E], added to scores for the choice but not to weights
    slots:   [T] int64, of K and V; 0 = padding, whose ids are -1 and weights 0; None = no padding
    Returns (ids [T, k] int32, best first and the smaller first among equals, weights [T, k]
    float32). Experts outside the chosen groups are never chosen.
    Raises ValueError if groups do not divide the experts, or hold fewer than k experts.
    """
    experts = logits.shape[1]
    if experts % routing.num_groups != 0:
        raise ValueError(f"{experts} experts do not divide into {routing.num_groups} groups")
    if experts // routing.num_groups * routing.top_groups < routing.top_k:
        raise ValueError(f"top_k is {routing.top_k}, but the chosen groups have fewer experts")
    if by_triton(logits.device):
        from remora.kernels.gpu import moe_routing

        return moe_routing.route(logits, routing, bias, slots)
    return route_reference(logits, routing, bias, slots)


def route_reference(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route` in torch."""
    wide = logits.float()
    scores = wide.sigmoid() if routing.is_sigmoid else wide.softmax(dim=1)
    choice = wide if routing.chooses_by_logits(has_bias=bias is not None) else scores
    if bias is not None:
        choice = scores + bias.float()
    if routing.num_groups > 1:
        of_group = choice.shape[1] // routing.num_groups
        grouped = choice.view(len(choice), routing.num_groups, of_group)
        best = min(routing.group_best, grouped.shape[2])
        of_groups = grouped.topk(best, dim=2).values.sum(dim=2)
        groups = of_groups.sort(dim=1, descending=True, stable=True).indices[
            :, : routing.top_groups
        ]
        is_chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, groups, True)
        choice = grouped.masked_fill(~is_chosen[:, :, None], -torch.inf).flatten(1)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.is_normalised:
        weights = weights / (weights.sum(dim=1, keepdim=True) + MIN_WEIGHT_SUM)
    ids, weights = ids.int(), weights * routing.scaling
    if slots is not None:
        is_padding = (slots == 0).unsqueeze(1)
        ids, weights = ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0.0)
    return ids, weights
