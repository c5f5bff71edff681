"""Layers of experts, and who chooses them, as torch computes them: against formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.linear import pack_weight
from remora.kernels.moe import moe, moe_by_expert, moe_reference
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import SILU, Gating, Routing

CLAMPED = Gating(sharpness=1.702, offset=1.0, limit=2.0)


def make_layer(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    return torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 9),
    experts=st.integers(1, 7),
    first_expert=st.integers(0, 2),
    gating=st.sampled_from([SILU, CLAMPED]),
    has_biases=st.sampled_from([(False, False), (True, False), (True, True)]),
    data=st.data(),
)
def test_products_by_expert_give_what_the_specification_gives(
    tokens: int,
    experts: int,
    first_expert: int,
    gating: Gating,
    has_biases: tuple[bool, bool],
    data: st.DataObject,
) -> None:
    """Also for ids of other ranks and for negative ids."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    gate_up, down = make_layer(experts, 6, 5)
    ids = torch.randint(-1, experts + first_expert + 1, (tokens, data.draw(st.integers(1, 3))))
    x, weights = torch.randn(tokens, 6), torch.rand(ids.shape)
    biases = torch.randn(experts, 10), torch.randn(experts, 6)
    options: dict[str, Any] = {
        "biases": tuple(
            bias if is_there else None for bias, is_there in zip(biases, has_biases, strict=True)
        ),
        "gating": gating,
        "first_expert": first_expert,
    }

    given = moe(x, ids.int(), weights, gate_up, down, **options)

    expected = moe_reference(x, ids.int(), weights, gate_up, down, **options)
    torch.testing.assert_close(given, expected, atol=2e-4, rtol=1e-4)


def test_unchosen_experts_are_not_read() -> None:
    gate_up, down = make_layer(4, 6, 5)
    gate_up[2], down[2] = torch.nan, torch.nan
    ids = torch.tensor([[0, 3], [3, 1]], dtype=torch.int32)

    given = moe(torch.randn(2, 6), ids, torch.ones(2, 2), gate_up, down)

    assert given.isfinite().all()


def test_packed_weights_give_the_same() -> None:
    gate_up, down = (weight.to(torch.bfloat16) for weight in make_layer(3, 64, 32))
    x, ids = torch.randn(5, 64).to(torch.bfloat16), torch.tensor([[2, 0]] * 5, dtype=torch.int32)
    weights = torch.rand(5, 2)
    plain = moe(x, ids, weights, gate_up, down)
    packed = [[pack_weight(each) for each in weight] for weight in (gate_up, down)]

    given = moe_by_expert(x, ids, weights, *packed, out=torch.empty_like(x))

    torch.testing.assert_close(given, plain)


@settings(max_examples=40)
@given(
    groups=st.integers(1, 4),
    of_group=st.integers(1, 4),
    is_sigmoid=st.booleans(),
    is_normalised=st.booleans(),
    has_bias=st.booleans(),
    data=st.data(),
)
def test_routing_is_what_its_words_say(
    groups: int,
    of_group: int,
    is_sigmoid: bool,
    is_normalised: bool,
    has_bias: bool,
    data: st.DataObject,
) -> None:
    """Token by token, in Python."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    top_groups = data.draw(st.integers(1, groups))
    routing = Routing(
        top_k=data.draw(st.integers(1, top_groups * of_group)),
        is_sigmoid=is_sigmoid,
        is_normalised=is_normalised,
        scaling=data.draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        top_groups=top_groups,
        group_best=data.draw(st.sampled_from([1, 2])),
    )
    logits = torch.randn(5, groups * of_group)
    bias = torch.randn(groups * of_group) / 3 if has_bias else None

    ids, weights = route(logits, routing, bias)

    for token in range(5):
        scores = (logits[token].sigmoid() if is_sigmoid else logits[token].softmax(0)).tolist()
        merits = [s + (bias[e].item() if bias is not None else 0) for e, s in enumerate(scores)]
        members = [range(g * of_group, (g + 1) * of_group) for g in range(groups)]
        ranked = sorted(
            members,
            key=lambda of: sum(sorted((merits[e] for e in of), reverse=True)[: routing.group_best]),
        )
        allowed = [e for of in ranked[-top_groups:] for e in of]
        chosen = sorted(allowed, key=lambda e: -merits[e])[: routing.top_k]
        total = sum(scores[e] for e in chosen) if is_normalised else 1.0
        assert ids[token].tolist() == chosen
        expected = [scores[e] / total * routing.scaling for e in chosen]
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("top_k", [1, 3])
def test_normalised_softmax_is_the_softmax_of_the_chosen_logits(top_k: int) -> None:
    """So models that choose first and normalise then need no words of their own."""
    logits = torch.randn(6, 8) * 3

    ids, weights = route(logits, Routing(top_k=top_k))

    best = logits.topk(top_k)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(weights, best.values.softmax(1))
