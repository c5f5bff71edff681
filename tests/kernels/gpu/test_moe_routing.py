"""The kernel that chooses experts against the torch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.moe_routing import route, route_reference
from remora.kernels.moe_rules import Routing
from tests.kernels.gpu.devices import interpreted_only

MODELS = {
    "Qwen3": (Routing(top_k=8), 128),
    "Mixtral": (Routing(top_k=2), 8),
    "DeepSeek-V2-Lite": (Routing(top_k=6, is_normalised=False), 64),
    "DeepSeek-V2": (
        Routing(top_k=6, is_normalised=False, scaling=16.0, num_groups=8, top_groups=3),
        160,
    ),
    "DeepSeek-V3": (
        Routing(top_k=8, is_sigmoid=True, scaling=2.5, num_groups=8, top_groups=4, group_best=2),
        256,
    ),
}


def check(logits: Tensor, routing: Routing, bias: Tensor | None) -> None:
    """Compare ids, which no rounding may change here, and weights."""
    ids, weights = route(logits, routing, bias)

    expected, of_expected = route_reference(
        logits.cpu(), routing, None if bias is None else bias.cpu()
    )
    assert ids.dtype == torch.int32
    assert torch.equal(ids.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), of_expected, rtol=1e-5, atol=1e-7)


def apart(tokens: int, experts: int) -> Tensor:
    """Return logits no two of which are nearly equal in a row."""
    ranks = torch.rand(tokens, experts).argsort(dim=1)
    return (ranks / experts - 0.5) * 6 + torch.rand(tokens, 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_models_choose_as_torch_does(device: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    routing, experts = MODELS[name]
    bias = torch.rand(experts) / 1000 if routing.group_best == 2 else None

    check(apart(5, experts).to(device, dtype), routing, None if bias is None else bias.to(device))


@interpreted_only
@settings(max_examples=40)
@given(
    tokens=st.integers(0, 3),
    num_groups=st.integers(1, 5),
    of_group=st.integers(1, 9),
    is_sigmoid=st.booleans(),
    is_normalised=st.booleans(),
    group_best=st.integers(1, 2),
    data=st.data(),
)
def test_any_number_of_groups_and_experts(
    tokens: int, num_groups: int, of_group: int, data: st.DataObject, **options: Any
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    top_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, top_groups * of_group))
    routing = Routing(top_k=top_k, num_groups=num_groups, top_groups=top_groups, **options)

    check(apart(tokens, num_groups * of_group), routing, None)


def test_the_smaller_of_equal_experts_is_first(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]], device=device)

    ids, weights = route(logits, Routing(top_k=4))

    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights.sum().item() == pytest.approx(1)


def test_a_bias_decides_and_weighs_nothing(device: str) -> None:
    logits, bias = torch.zeros(1, 4, device=device), torch.zeros(4, device=device)
    bias[2] = -5.0
    bias[3] = 9.0

    ids, weights = route(logits, Routing(top_k=2, is_sigmoid=True, is_normalised=False), bias)

    assert ids.tolist() == [[3, 0]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_logits_that_are_no_numbers_choose_experts_that_exist(device: str) -> None:
    logits = torch.full((2, 6), -torch.inf, device=device)
    logits[:, 1] = torch.nan

    ids, _ = route(logits, Routing(top_k=3))

    assert ids.min() >= 0
    assert ids.max() < 6


@pytest.mark.parametrize("name", MODELS)
def test_padding_gets_no_expert(device: str, name: str) -> None:
    torch.manual_seed(0)
    routing, experts = MODELS[name]
    logits = apart(5, experts).to(device)
    slots = torch.tensor([16, 0, 1, 0, 2**40], device=device)
    is_padding = slots == 0

    ids, weights = route(logits, routing, slots=slots)
    others, of_others = route(logits[~is_padding], routing)

    assert (ids[is_padding] == -1).all()
    assert (weights[is_padding] == 0).all()
    assert torch.equal(ids[~is_padding], others)
    assert torch.equal(weights[~is_padding], of_others)
    expected, of_expected = route_reference(logits.cpu(), routing, slots=slots.cpu())
    assert torch.equal(ids.cpu(), expected)
    torch.testing.assert_close(weights.cpu(), of_expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("routing", "message"),
    [(Routing(top_k=2, num_groups=4, top_groups=2), "6 experts"), (Routing(top_k=7), "top_k is 7")],
)
def test_choices_that_cannot_be_made_are_refused(routing: Routing, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(1, 6), routing)
    with pytest.raises(ValueError, match="group"):
        Routing(top_k=2, group_best=3)
