"""Layers of experts in step programs, against `kernels/moe_routing.py` and a loop over tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.experts import (
    BLOCK_ROWS,
    Choices,
    add_weighted,
    gather,
    multiply_experts,
    route,
    scale_tokens,
    sort_pairs,
)
from remora.kernels.cpu.library import Epilogue, Format, Team
from remora.kernels.cpu.packing import PACKED
from remora.kernels.cpu.program import Program
from remora.kernels.moe import through_gates
from remora.kernels.moe_routing import route_reference
from remora.kernels.moe_rules import SILU, Gating, Routing
from tests.kernels.cpu.products import (
    GUARD,
    make_batch,
    make_rows,
    multiply,
    one_step,
    pack_alone,
    read_rows,
    unpack,
)

ROUTINGS = [
    Routing(top_k=2),
    Routing(top_k=1, is_normalised=False),
    Routing(top_k=4, is_sigmoid=True, scaling=2.5),
    Routing(top_k=3, num_groups=4, top_groups=2, is_normalised=False),
    Routing(top_k=4, num_groups=4, top_groups=2, group_best=2, is_sigmoid=True, scaling=2.5),
]


def run_route(team: Team, logits: Tensor, routing: Routing, correction: Tensor | None) -> Choices:
    """Choose, and sort the pairs; there is a row more than is run."""
    count, number = logits.shape
    choices = Choices.allocate(num_tokens=count + 1, num_experts=number, top_k=routing.top_k)
    choices.ids[count] = choices.places[count] = -7
    program = Program(team, make_batch(count))
    route(program, F.pad(logits, (0, 3)).contiguous(), routing, correction, choices)
    sort_pairs(program, choices)
    program.run(count, 0, 0)
    assert (choices.ids[count] == -7).all()
    assert (choices.places[count] == -7).all()
    return choices


@pytest.mark.parametrize("has_correction", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_experts_are_chosen_as_torch_does(
    each_team: Team, routing: Routing, has_correction: bool
) -> None:
    torch.manual_seed(routing.top_k)
    logits = 3 * torch.randn(200, 16)
    logits[:20] = logits[:20].round()  # equals
    correction = torch.randn(16) if has_correction else None

    found = run_route(each_team, logits, routing, correction)

    ids, weights = route_reference(logits, routing, correction)
    assert torch.equal(found.ids[:200], ids)
    torch.testing.assert_close(found.weights[:200], weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_in_the_weights(
    each_team: Team, routing: Routing, bad: float
) -> None:
    logits = torch.full((2, 16), bad)
    logits[1] = torch.arange(16.0)
    logits[1, 1] = math.nan  # of the worst group

    found = run_route(each_team, logits, routing, None)

    assert ((found.ids[:2] >= 0) & (found.ids[:2] < 16)).all()
    if math.isnan(bad) or not routing.is_sigmoid:
        assert found.weights[0].isnan().all()
    assert found.weights[1].isnan().any()


@given(st.integers(1, 40) | st.integers(190, 600), st.integers(1, 12), st.data())
def test_pairs_are_sorted_by_expert_and_by_token(
    team: Team, num_tokens: int, num_experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    logits = torch.randn(num_tokens, num_experts)

    found = run_route(team, logits, Routing(top_k=top_k), None)

    ids = found.ids[:num_tokens].flatten().long()
    order = ids.argsort(stable=True)
    assert torch.equal(found.places[:num_tokens].flatten().long()[order], torch.arange(len(ids)))
    assert torch.equal(found.tokens[: len(ids)].long(), order // top_k)
    counts = torch.bincount(ids, minlength=num_experts)
    assert torch.equal(found.starts.long(), F.pad(counts.cumsum(0), (1, 0)))
    ranges = itertools.pairwise(found.starts.tolist())
    blocks = [block for first, last in ranges for block in range(first, last, BLOCK_ROWS)]
    most = Choices.allocate(num_tokens=num_tokens, num_experts=num_experts, top_k=top_k)
    found_blocks = found.blocks[: len(most.blocks)].tolist()
    assert found_blocks == blocks + [-1] * (len(most.blocks) - len(blocks))


def chosen(
    team: Team, num_tokens: int, num_experts: int, top_k: int, *, skewed: bool = False
) -> Choices:
    """Choose at random, or all tokens the same experts, and sort the pairs."""
    choices = Choices.allocate(num_tokens=num_tokens, num_experts=num_experts, top_k=top_k)
    scores = torch.rand(1 if skewed else num_tokens, num_experts).expand(num_tokens, -1)
    choices.ids[:] = scores.topk(top_k).indices
    choices.weights[:] = torch.rand(num_tokens, top_k)
    with one_step(team, num_tokens) as program:
        sort_pairs(program, choices)
    return choices


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "skewed"),
    [(1, 8, 2, False), (7, 5, 5, False), (30, 8, 2, False), (30, 64, 3, False), (400, 3, 1, True)],
)
def test_each_row_is_multiplied_with_its_expert_s_weight(
    each_team: Team, format: Format, num_tokens: int, num_experts: int, top_k: int, skewed: bool
) -> None:
    """To the bit as products of one weight do it, which their own tests compare with torch."""
    torch.manual_seed(num_tokens)
    size, inner = 70, 40
    x = torch.randn(num_tokens, size)
    weights = torch.randn(num_experts, 2 * inner, size)
    choices = chosen(each_team, num_tokens, num_experts, top_k, skewed=skewed)
    packed = [pack_alone(each_team, weight, None, format, gated=True) for weight in weights]
    rows = make_rows(each_team, format, x)
    gathered = Rows.allocate(each_team, format, num_tokens * top_k + 1, size)
    out = torch.full((num_tokens * top_k + 1, packed[0].out_columns), GUARD)

    with one_step(each_team, num_tokens) as program:
        gather(program, rows, gathered, choices)
        multiply_experts(program, gathered, packed, out, choices, gating=SILU)

    assert (out[-1] == GUARD).all()
    assert not gathered.values[-1].any()
    assert torch.equal(read_rows(gathered, size)[:-1], read_rows(rows, size)[choices.tokens.long()])
    for expert, weight in enumerate(packed):
        ids = (choices.ids == expert).nonzero()
        if len(ids) == 0:
            continue
        one_by_one = multiply(each_team, rows, weight, epilogue=Epilogue.GATED)
        places = choices.places[choices.ids == expert].long()
        assert torch.equal(out[places], one_by_one[ids[:, 0]])


def test_many_experts_in_long_steps_are_a_number_of_chunks_that_a_team_can_count(
    team: Team,
) -> None:
    """2**24 of one stage; that many would be if each expert could have all tokens."""
    number, columns = 16_384, 768
    weight = pack_alone(team, torch.ones(columns, 1), None, Format.F32)
    x = make_rows(team, Format.F32, torch.arange(number).float().unsqueeze(1))
    choices = Choices.allocate(num_tokens=number, num_experts=number, top_k=1)
    out = torch.zeros(number, columns)

    with one_step(team, number) as program:
        sort_pairs(program, choices)
        multiply_experts(program, x, [weight] * number, out, choices)

    assert torch.equal(out, x.values.expand(number, columns))


@pytest.mark.parametrize("format", PACKED)
def test_what_an_expert_reads_is_weighed_once(each_team: Team, format: Format) -> None:
    x, choices = torch.randn(5, 70), chosen(each_team, 5, 4, 1)
    weights = choices.weights.clone()
    rows = Rows.allocate(each_team, format, 6, 70)

    with one_step(each_team, 5) as program:
        scale_tokens(program, x, 70, rows, choices)

    expected = read_rows(make_rows(each_team, format, x * weights), 70)
    assert torch.equal(read_rows(rows, 70)[:5], expected)
    assert not rows.values[5].any()
    assert (choices.weights == 1).all()


@pytest.mark.parametrize("format", [Format.F32, Format.Q8])
@pytest.mark.parametrize(
    "gating", [Gating(sharpness=1.7, offset=1.0, limit=2.0), Gating(sharpness=0.5)], ids=str
)
def test_gates_let_through_what_their_rule_says(
    each_team: Team, gating: Gating, format: Format
) -> None:
    x, weight, bias = torch.randn(5, 64), torch.randn(2 * 24, 64) / 4, torch.randn(2 * 24)
    x[4, 0] = math.nan
    packed = pack_alone(each_team, weight, bias, format, gated=True)
    rows = make_rows(each_team, format, x)
    choices = chosen(each_team, 5, 1, 1)
    out = torch.empty(5, packed.out_columns)

    with one_step(each_team, 5) as program:
        multiply_experts(program, rows, [packed], out, choices, gating=gating)

    wide = read_rows(rows, 64) @ unpack(each_team, packed).values.T + bias
    expected = through_gates(wide, gating).float()
    torch.testing.assert_close(out[:, :24], expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out[4, :24].isnan().all()


@pytest.mark.parametrize("size", [1, 16, 70])
@pytest.mark.parametrize("top_k", [1, 3])
def test_rows_are_added_with_their_weights(each_team: Team, size: int, top_k: int) -> None:
    torch.manual_seed(size)
    choices, x = chosen(each_team, 9, 6, top_k), torch.randn(9 * top_k, size + 2)
    start = torch.randn(10, size + 1)
    out = start.clone()

    with one_step(each_team, 9) as program:
        add_weighted(program, x, size, choices.weights, out, choices)

    given_rows = x[choices.places.long()][..., :size].double()
    expected = start[:9, :size] + (given_rows * choices.weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(out[:9, :size].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[9], start[9])
    assert torch.equal(out[:, size], start[:, size])


def test_a_token_s_only_row_is_added_with_its_weight(team: Team) -> None:
    x, weights, out = torch.randn(5, 70), torch.rand(5, 64), torch.zeros(5, 70)

    with one_step(team, 5) as program:
        add_weighted(program, x, 70, weights, out)

    torch.testing.assert_close(out, x * weights[:, :1])


def test_weights_of_several_shapes_are_refused(team: Team) -> None:
    choices, x = chosen(team, 2, 2, 1), Rows.of(torch.zeros(2, 32))
    weights = [pack_alone(team, torch.zeros(n, 32), None, Format.F32) for n in (32, 16)]
    program = Program(team, make_batch(2))

    with pytest.raises(ValueError, match="shape"):
        multiply_experts(program, x, weights, torch.zeros(2, 64), choices)
    with pytest.raises(ValueError, match="1 weights for 2 experts"):
        multiply_experts(program, x, weights[:1], torch.zeros(2, 64), choices)
    assert unpack(team, weights[0]).values.shape == (32, 32)
