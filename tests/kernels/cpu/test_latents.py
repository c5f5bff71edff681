"""What is around attention over latents, against torch head by head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.latents import join_heads, join_latents, multiply_heads
from remora.kernels.cpu.library import Format, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.packing import PACKED
from remora.kernels.cpu.program import Program
from tests.kernels.cpu.products import (
    GUARD,
    make_batch,
    make_rows,
    one_step,
    pack_alone,
    read_rows,
    unpack,
)

NUM_HEADS = 3


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.F16])
@pytest.mark.parametrize(("count", "n", "k"), [(1, 70, 13), (7, 128, 16), (400, 11, 33)])
def test_each_head_is_multiplied_with_its_weight(
    each_team: Team, count: int, n: int, k: int, format: Format
) -> None:
    """Heads lie with something between them, which no product reads; 400 rows are three blocks."""
    torch.manual_seed(count)
    x_step, columns = k + 3, -(-n // 64) * 64
    out_step = columns + 16
    x = torch.randn(count, NUM_HEADS * x_step)
    weights = [pack_alone(each_team, torch.randn(n, k), None, format) for _ in range(NUM_HEADS)]
    rows = make_rows(each_team, format, x)
    out = torch.full((count + 1, NUM_HEADS * out_step), GUARD)

    with one_step(each_team, count) as program:
        multiply_heads(program, rows, x_step, weights, out, out_step)

    assert (out[count] == GUARD).all()
    read, made = by_head(read_rows(rows, x.shape[1])), by_head(out[:count])
    assert (made[:, :, columns:] == GUARD).all()
    for head, weight in enumerate(weights):
        expected = read[:, head, :k].double() @ unpack(each_team, weight).values.T
        torch.testing.assert_close(made[:, head, :n].double(), expected, rtol=1e-5, atol=1e-4)


def by_head(x: Tensor) -> Tensor:
    return x.view(len(x), NUM_HEADS, -1)


def test_attention_reads_queries_of_latents_and_what_is_kept(each_team: Team) -> None:
    count, size, key_size, rotary_size, step = 5, 33, 13, 6, 64
    torch.manual_seed(0)
    absorbed = torch.randn(count, NUM_HEADS * step)
    query = torch.randn(count, NUM_HEADS * (key_size + rotary_size))
    wide = torch.randn(count, 9 + size + rotary_size + 2)
    kept, weight = wide[:, 9 : 9 + size + rotary_size], torch.rand(size)
    heads = torch.full((count + 1, (NUM_HEADS + 1) * (size + rotary_size) + 5), GUARD)

    with one_step(each_team, count) as program:
        join_latents(
            program,
            absorbed,
            step,
            query,
            kept,
            NormWeights(weight=weight, epsilon=1e-6),
            heads,
            num_heads=NUM_HEADS,
            key_size=key_size,
            rotary_size=rotary_size,
        )

    latent = F.rms_norm(kept[:, :size], (size,), weight, 1e-6)
    queries = torch.cat((by_head(absorbed)[..., :size], by_head(query)[..., key_size:]), dim=2)
    expected = torch.cat((queries.flatten(1), latent, kept[:, size:]), dim=1)
    torch.testing.assert_close(heads[:count, : expected.shape[1]], expected)
    assert (heads[count] == GUARD).all()
    assert (heads[:, expected.shape[1] :] == GUARD).all()


@pytest.mark.parametrize("format", PACKED)
def test_values_of_heads_come_side_by_side(each_team: Team, format: Format) -> None:
    count, size, step = 5, 23, 64
    torch.manual_seed(0)
    x = torch.randn(count, NUM_HEADS * step)
    rows = Rows.allocate(each_team, format, count + 1, NUM_HEADS * size)

    with one_step(each_team, count) as program:
        join_heads(program, x, step, NUM_HEADS, size, rows)

    expected = make_rows(each_team, format, by_head(x)[..., :size].flatten(1))
    assert torch.equal(rows.values[:count], expected.values)
    assert torch.equal(
        read_rows(rows, NUM_HEADS * size)[:count], read_rows(expected, NUM_HEADS * size)
    )
    assert not rows.values[count].any()


def test_heads_without_room_are_refused(team: Team) -> None:
    weights = [pack_alone(team, torch.zeros(70, 16), None, Format.F32)] * NUM_HEADS
    x, out = Rows.of(torch.zeros(2, NUM_HEADS * 16)), torch.zeros(2, NUM_HEADS * 128)
    program = Program(team, make_batch(2))

    with pytest.raises(ValueError, match="do not fit 3 F32 weights"):
        multiply_heads(program, x, 15, weights, out, 128)
    with pytest.raises(ValueError, match="do not fit 3 F32 weights"):
        multiply_heads(program, x, 16, weights, out, 70)
    with pytest.raises(ValueError, match="do not fit"):
        join_heads(program, out, 128, NUM_HEADS, 23, Rows.of(torch.zeros(2, 68)))
