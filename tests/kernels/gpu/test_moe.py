"""Kernels of layers of experts against the torch code."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import remora.kernels.gpu.moe as kernels
from remora.kernels.gpu.moe_align import MAX_FEW, align
from remora.kernels.moe import moe, moe_reference
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import SILU, Gating, Routing
from remora.kernels.moe_weights import ExpertWeight, StackableWeight, allocate_stack, write_rows
from remora.kernels.quantised.quant_formats import (
    BLOCK,
    Fp4GroupWeight,
    Fp8BlockWeight,
    GroupWeight,
)
from tests.kernels.gpu.devices import (
    interpreted_only,
    on_gpu,
    poisoned,
    poisoned_memory,
)
from tests.kernels.quantised_weights import MAKERS, random_fp8, random_scales

# Of outputs of about one, made of two rounded sums and k rounded addends.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCES)
CLAMPED = Gating(sharpness=1.7, offset=1.0, limit=1.5)
# Rows that only fill blocks up are scaled like others, and then not looked at: they may hold no
# numbers, of which the interpreter's numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")


def make_ids(tokens: int, top_k: int, experts: int, device: str) -> Tensor:
    """Return different experts for each token."""
    return torch.rand(tokens, experts).argsort(dim=1)[:, :top_k].to(device, torch.int32)


def make_weights(
    experts: int, hidden: int, inner: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden, device=device) / hidden**0.5
    down = torch.randn(experts, hidden, inner, device=device) / inner**0.5
    return gate_up.to(dtype), (down * 2).to(dtype)


def make_fp8_weights(
    experts: int, hidden: int, inner: int, device: str
) -> tuple[Fp8BlockWeight, Fp8BlockWeight]:
    def make(outputs: int, inputs: int) -> Fp8BlockWeight:
        values = random_fp8(experts, outputs, inputs, device=device)
        scales = random_scales(experts, -(-outputs // BLOCK), -(-inputs // BLOCK), device=device)
        return Fp8BlockWeight(values=values, scales=scales / 16 / inputs**0.5)

    return make(2 * inner, hidden), make(hidden, inner)


def make_grouped(
    name: str, experts: int, hidden: int, inner: int, device: str
) -> tuple[StackableWeight, StackableWeight]:
    """Stack weights of a format, with factors or scales that make outputs of about one."""

    def make(outputs: int, inputs: int) -> StackableWeight:
        each = [MAKERS[name](outputs, inputs, device) for _ in range(experts)]
        assert isinstance(each[0], GroupWeight)
        stack = allocate_stack(each[0], experts, outputs, device)
        for expert, one in enumerate(each):
            assert isinstance(one, GroupWeight)
            write_rows(stack, expert, 0, one)
        size = float(stack.dequantised().square().mean().sqrt()) * inputs**0.5
        if name == "mxfp4":
            less = (stack.scales.view(torch.uint8) - round(math.log2(size))).to(torch.uint8)
            return replace(stack, scales=less.view(torch.float8_e8m0fnu))
        if isinstance(stack, Fp4GroupWeight):
            assert stack.factors is not None
            return replace(stack, factors=stack.factors / size)
        return replace(stack, scales=(stack.scales / size).to(stack.scales.dtype))

    return make(2 * inner, hidden), make(hidden, inner)


def check(
    x: Tensor,
    ids: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    tolerance: float,
    **options: Any,
) -> Tensor:
    weights = torch.rand(ids.shape, device=x.device)
    y = poisoned(*x.shape, dtype=x.dtype, device=str(x.device))

    made = moe(x, ids, weights, gate_up, down, out=y, **options)

    assert made is y
    expected = moe_reference(x, ids, weights, gate_up, down, **options)
    torch.testing.assert_close(y.float(), expected.float(), atol=tolerance, rtol=tolerance)
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [
        *((tokens, experts, 2, 72, 40) for tokens, experts in ((1, 8), (7, 5), (30, 2))),
        *((tokens, 1, 1, 64, 128) for tokens in (1, 6, 50, 90)),  # blocks of every size
    ],
)
def test_experts_agree_with_torch(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
) -> None:
    torch.manual_seed(tokens)
    gate_up, down = make_weights(experts, hidden, inner, dtype, device)
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    ids = make_ids(tokens, top_k, experts, device)

    check(x, ids, gate_up, down, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_biases_and_gates_with_limits_agree_with_torch(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, down = make_weights(5, 72, 40, dtype, device)
    biases = torch.randn(5, 80, device=device).to(dtype), torch.randn(5, 72, device=device)
    x, ids = torch.randn(7, 72, device=device).to(dtype), make_ids(7, 2, 5, device)
    options: dict[str, Any] = {"gating": CLAMPED, "tolerance": 2 * TOLERANCES[dtype]}

    both = check(x, ids, gate_up, down, biases=biases, **options)
    first = check(x, ids, gate_up, down, biases=(biases[0], None), **options)
    plain = check(x, ids, gate_up, down, gating=SILU, tolerance=TOLERANCES[dtype])

    assert not torch.allclose(both, first)
    assert not torch.allclose(first, plain)


def test_an_invariant_row_has_the_same_bits_in_any_batch(device: str) -> None:
    torch.manual_seed(0)
    gate_up, down = make_weights(2, 160, 48, torch.bfloat16, device)
    x, ids = torch.randn(90, 160, device=device).to(torch.bfloat16), make_ids(90, 2, 2, device)
    weights = torch.rand(ids.shape, device=device)

    together = moe(x, ids, weights, gate_up, down, invariant=True)
    alone = moe(x[:1], ids[:1], weights[:1], gate_up, down, invariant=True)

    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize(("tokens", "experts"), [(2, 3), (20, 2)])
def test_float8_in_blocks_agrees_with_torch(device: str, tokens: int, experts: int) -> None:
    """Numbers near the middle of two of float8 may be rounded to the other one."""
    torch.manual_seed(tokens)
    gate_up, down = make_fp8_weights(experts, 136, 128, device)
    x = torch.randn(tokens, 136, device=device).to(torch.bfloat16)

    with poisoned_memory():
        check(x, make_ids(tokens, 2, experts, device), gate_up, down, tolerance=5e-2)


GROUPED = ("int4 32", "int4 128", "int8 32", "mxfp4", "nvfp4")


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(3, torch.bfloat16), (22, torch.float16), (45, torch.bfloat16), (5, torch.float32)],
    ids=str,
)
def test_weights_in_groups_agree_with_torch(
    device: str, name: str, tokens: int, dtype: torch.dtype
) -> None:
    """Of inputs that are no whole runs, with biases, in blocks of every size."""
    torch.manual_seed(tokens)
    gate_up, down = make_grouped(name, 2, 160, 96, device)
    biases = torch.randn(2, 192, device=device).to(dtype), torch.randn(2, 160, device=device)
    x, ids = torch.randn(tokens, 160, device=device).to(dtype), make_ids(tokens, 2, 2, device)
    tolerance = 2 * TOLERANCES[dtype]

    check(x, ids, gate_up, down, biases=biases, gating=CLAMPED, tolerance=tolerance)


@interpreted_only
@settings(max_examples=8)
@given(
    tokens=st.integers(0, 12),
    experts=st.integers(1, 6),
    hidden=st.integers(1, 70),
    inner=st.integers(1, 40),
    data=st.data(),
)
def test_ragged_layers_agree_with_torch(
    tokens: int, experts: int, hidden: int, inner: int, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9)))
    top_k = data.draw(st.integers(1, experts))
    gate_up, down = make_weights(experts, hidden, inner, torch.float32, "cpu")

    ids = make_ids(tokens, top_k, experts, "cpu")
    check(torch.randn(tokens, hidden), ids, gate_up, down, tolerance=1e-5)


def test_ranks_that_hold_some_experts_make_the_sum_of_all(device: str) -> None:
    torch.manual_seed(0)
    gate_up, down = make_weights(6, 48, 32, torch.float32, device)
    x, ids = torch.randn(5, 48, device=device), make_ids(5, 3, 6, device)
    ids[4] = -1
    weights = torch.rand(ids.shape, device=device)

    parts = [
        moe(x, ids, weights, gate_up[part], down[part], first_expert=part.start)
        for part in (slice(0, 2), slice(2, 6))
    ]

    expected = moe_reference(x, ids, weights, gate_up, down)
    torch.testing.assert_close(parts[0] + parts[1], expected, atol=1e-5, rtol=1e-5)
    assert not parts[0][4].any()


@pytest.mark.parametrize("tokens", [9, 70])  # in blocks of 16 and 32 rows
def test_padding_reads_no_weight_and_changes_no_bit(device: str, tokens: int) -> None:
    """All experts that only padding asks for are NaN, and so are its inputs."""
    torch.manual_seed(0)
    gate_up, down = make_weights(6, 48, 32, torch.bfloat16, device)
    x = torch.randn(tokens, 48, device=device).to(torch.bfloat16)
    logits = torch.randn(tokens, 6, device=device)
    logits[:, :3] += 9.0
    is_padding = torch.arange(tokens, device=device) % 3 == 1
    logits[is_padding] = -logits[is_padding]
    slots = torch.where(is_padding, 0, 5)
    expected_ids, weights = route(logits, Routing(top_k=2))
    expected = moe(x, expected_ids, weights, gate_up, down)

    ids, weights = route(logits, Routing(top_k=2), slots=slots)
    gate_up[3:], down[3:], x[is_padding] = torch.nan, torch.nan, torch.nan
    made = moe(x, ids, weights, gate_up, down)

    assert torch.equal(made[~is_padding], expected[~is_padding])
    assert not made[is_padding].any()
    blocks, few = align(ids, 6, 0, 16), align(ids[~is_padding], 6, 0, 16)
    used = few.experts[few.experts >= 0]
    assert torch.equal(blocks.experts[blocks.experts >= 0], used)
    assert set(used.tolist()) == {0, 1, 2}


def test_the_same_pairs_give_the_same_bits_in_rows_of_wider_memory(device: str) -> None:
    torch.manual_seed(0)
    gate_up, down = make_weights(4, 32, 16, torch.bfloat16, device)
    ids = make_ids(9, 2, 4, device)
    wide = torch.full((9, 100), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, 30:62] = torch.randn(9, 32, device=device)
    weights = torch.rand(ids.shape, device=device)

    first = moe(wide[:, 30:62], ids, weights, gate_up, down)
    again = moe(wide[:, 30:62].contiguous(), ids, weights, gate_up, down)

    assert torch.equal(first, again)


@settings(max_examples=12)
@given(
    pairs=st.sampled_from([0, 1, 3, 40, MAX_FEW, MAX_FEW + 1, 2500]),
    experts=st.integers(1, 40),
    size=st.sampled_from([16, 64]),
    seed=st.integers(0, 9),
)
def test_pairs_are_sorted_by_expert_in_order(
    device: str, pairs: int, experts: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    first, held = 3, max(1, experts - 4)
    ids = torch.randint(-1, experts + 4, (pairs, 1), dtype=torch.int32)
    if pairs == 0:
        return

    blocks = align(ids.to(device), held, first, size)

    rows = blocks.pairs.cpu().view(-1, size)
    of_blocks = blocks.experts.tolist()
    found: dict[int, list[int]] = {}
    for expert, row in zip(of_blocks, rows.tolist(), strict=True):
        if expert >= 0:
            found.setdefault(expert, []).extend(row)
    for expert in range(held):
        expected = (ids[:, 0] == expert + first).nonzero()[:, 0].tolist()
        filled = -(-len(expected) // size) * size
        assert found.pop(expert, []) == expected + [pairs] * (filled - len(expected))
    assert found == {}
    used = sum(expert >= 0 for expert in of_blocks)
    assert of_blocks[used:] == [-1] * (len(of_blocks) - used)


def test_weights_that_do_not_fit_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids = torch.randn(2, 128, device=device), make_ids(2, 1, 2, device)
    weights = torch.ones(2, 1, device=device)
    gate_up, down = make_weights(2, 128, 40, torch.float32, device)
    narrow, narrow_down = make_fp8_weights(2, 128, 64, device)
    fp8, fp8_down = make_fp8_weights(2, 128, 128, device)

    with pytest.raises(ValueError, match="rows of 100"):
        moe(x[:, :100], ids, weights, gate_up, down)
    with pytest.raises(ValueError, match="rows of 128"):
        moe(x, ids, weights, gate_up, gate_up)
    with pytest.raises(ValueError, match="inner size is 64"):
        moe(x, ids, weights, narrow, narrow_down)
    monkeypatch.setattr(kernels, "has_fp8", lambda device: False)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        moe(x, ids, weights, fp8, fp8_down)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 64, 300, 4096])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_layer_of_a_models_size_agrees_with_torch(tokens: int, is_fp8: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 2048, device="cuda").to(torch.bfloat16)
    ids = make_ids(tokens, 8, 128, "cuda")

    if is_fp8:
        check(x, ids, *make_fp8_weights(128, 2048, 768, "cuda"), tolerance=5e-2)
    else:
        weights = make_weights(128, 2048, 768, torch.bfloat16, "cuda")
        check(x, ids, *weights, tolerance=3e-2)
