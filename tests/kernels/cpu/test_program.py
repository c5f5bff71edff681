"""Operations on rows, and running parts of a program, against a few lines of torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.cpu.buffers import PagedCache, Rows
from remora.kernels.cpu.library import Format, Team
from remora.kernels.cpu.norms import NormWeights
from remora.kernels.cpu.packing import PACKED
from remora.kernels.cpu.program import Program
from remora.kernels.norm import rms_norm
from remora.kernels.rope import apply_rope
from tests.kernels.cpu.products import EPS, make_batch, one_step, read_rows

NORM_EPS = 1e-5
SIZES = [1, 15, 16, 17, 64, 70, 96, 200]


def run_norm(
    team: Team, x: Tensor, norm: NormWeights, format: Format, wanted: list[int] | None = None
) -> Rows:
    """Normalise every row of x, or those wanted, as rows of logits."""
    count = len(x) if wanted is None else len(wanted)
    rows = Rows.allocate(team, format, count + 1, len(norm.weight))
    batch = make_batch(len(x) + count)
    program = Program(team, batch)
    program.norm(x, norm, rows, on_logits=wanted is not None)
    if wanted is not None:
        batch.logit_index[:count] = wanted
    program.run(0 if wanted else len(x), 0, 0 if wanted is None else count)
    assert not rows.values[count].any(), "the row after the last was written to"
    return rows


def tolerance(format: Format, expected: Tensor) -> Tensor:
    """Bound the error of rounding to the format, of the largest value of a row for groups."""
    exact = 8 * EPS[torch.float32] * (1 + expected.abs())
    if format.of_rows is Format.F32:
        return exact
    if format is Format.BF16:
        return exact + EPS[torch.bfloat16] * expected.abs()
    return exact + expected.abs().amax(1, keepdim=True) / 127 / 2 * (1 + 1e-5)


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("size", SIZES)
def test_norm_is_that_of_torch_in_the_format_of_the_rows(
    each_team: Team, size: int, format: Format
) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(9, size + 3), torch.randn(size)

    rows = run_norm(each_team, x, NormWeights(weight=weight, epsilon=NORM_EPS), format)

    expected = rms_norm(x[:, :size].double(), weight.double(), NORM_EPS)
    error = (read_rows(rows, size)[:9] - expected).abs()
    assert (error <= tolerance(format, expected)).all()


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("size", [15, 70, 96])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_is_that_of_torch(
    each_team: Team, has_bias: bool, size: int, format: Format
) -> None:
    x, weight = torch.randn(9, size) + 3, torch.randn(size)
    bias = torch.randn(size) if has_bias else None
    norm = NormWeights(weight=weight, bias=bias, epsilon=NORM_EPS, is_centered=True)

    rows = run_norm(each_team, x, norm, format)

    exact_bias = None if bias is None else bias.double()
    expected = F.layer_norm(x.double(), (size,), weight.double(), exact_bias, NORM_EPS)
    error = (read_rows(rows, size)[:9] - expected).abs()
    # What is subtracted was rounded at the size of x.
    assert (error <= 8 * tolerance(format, expected)).all()


def test_a_norm_is_added_to_rows_of_floats(each_team: Team) -> None:
    x, norm = torch.randn(5, 70), NormWeights(weight=torch.randn(70), epsilon=NORM_EPS)
    start = torch.randn(6, 72)
    stream, normal = start.clone(), torch.zeros(6, 72)

    with one_step(each_team, 5) as program:
        program.norm(x, norm, Rows.of(normal))
        program.norm(x, norm, Rows.of(stream), adds=True)

    assert normal[:5, :70].all()
    assert torch.equal(stream, start + normal)


def test_a_norm_is_added_to_floats_only(team: Team) -> None:
    program = Program(team, make_batch(1))
    rows = Rows.allocate(team, Format.BF16, 1, 16)

    with pytest.raises(ValueError, match="BF16"):
        program.norm(
            torch.zeros(1, 16), NormWeights(weight=torch.ones(16), epsilon=1.0), rows, adds=True
        )


@pytest.mark.parametrize("format", PACKED)
def test_norm_on_logits_takes_the_rows_that_are_wanted(team: Team, format: Format) -> None:
    x, norm = torch.randn(30, 70), NormWeights(weight=torch.randn(70), epsilon=NORM_EPS)
    wanted = [29, 0, 7, 7]

    gathered = read_rows(run_norm(team, x, norm, format, wanted), 70)
    everything = read_rows(run_norm(team, x, norm, format), 70)

    assert torch.equal(gathered[:4], everything[wanted])


def test_norm_of_zeros_is_zero(team: Team) -> None:
    norm = NormWeights(weight=torch.ones(40), epsilon=NORM_EPS)

    assert not run_norm(team, torch.zeros(2, 40), norm, Format.F32).values.any()


def test_more_operations_than_one_job_holds_run_in_order(team: Team) -> None:
    x, norm = torch.zeros(1, 64), NormWeights(weight=torch.ones(64), epsilon=NORM_EPS)
    rows = Rows.allocate(team, Format.F32, 1, 64)

    with one_step(team, 1) as program:
        program.embed(torch.arange(1.0, 65.0).repeat(2, 1), x)
        for _ in range(5000):
            program.norm(x, norm, rows)
        program.norm(rows.values, norm, Rows.allocate(team, Format.F32, 1, 64))

    assert len(program) == 5002
    expected = F.rms_norm(torch.arange(1.0, 65.0), (64,), eps=NORM_EPS)
    torch.testing.assert_close(rows.values[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_embedding_looks_rows_up(team: Team, size: int, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, size).to(dtype), torch.tensor([49, 0, 3, 3, 20])
    out = torch.full((6, size + 2), -7.0)
    batch = make_batch(5)
    batch.token_ids[:] = ids.numpy()
    program = Program(team, batch)
    program.embed(table, out)

    program.run(5, 0, 0)

    assert torch.equal(out[:5, :size], table[ids].float())
    assert (out[5] == -7).all()
    assert (out[:, size:] == -7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learned_positions_are_added_to_what_was_looked_up(team: Team, dtype: torch.dtype) -> None:
    table, learned = torch.randn(50, 70).to(dtype), torch.randn(9, 70).to(dtype)
    out, batch = torch.zeros(3, 72), make_batch(3)
    batch.token_ids[:] = 49, 0, 3
    batch.positions[:] = 8, 2, 0
    program = Program(team, batch)
    program.embed(table, out)
    program.embed(learned, out, by_position=True)

    program.run(3, 0, 0)

    assert torch.equal(out[:, :70], table[[49, 0, 3]].float() + learned[[8, 2, 0]].float())
    assert not out[:, 70:].any()


@settings(max_examples=60)
@given(
    size=st.integers(1, 200),
    num_rows=st.integers(1, 40),
    format=st.sampled_from([Format.Q8, Format.Q4]),
    factor=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
)
def test_quantised_rows_are_off_by_half_a_step(
    team: Team, size: int, num_rows: int, format: Format, factor: float
) -> None:
    x = torch.randn(num_rows, size + 1) * factor
    x[num_rows // 2, : size // 2] = 0
    rows = Rows.allocate(team, format, num_rows + 1, size)

    with one_step(team, num_rows) as program:
        program.round(x, size, rows)

    assert rows.scales is not None
    assert rows.sums is not None
    group = rows.values.shape[1] // rows.scales.shape[1]
    grouped = rows.values.view(num_rows + 1, -1, group)
    steps = rows.scales.repeat_interleave(group, 1)[:num_rows, :size].double()
    error = (read_rows(rows, size)[:num_rows] - x[:, :size].double()).abs()
    assert (error <= steps / 2 * (1 + 1e-4)).all()
    padded = torch.zeros(num_rows, rows.values.shape[1])
    padded[:, :size] = x[:, :size]
    largest = padded.view(num_rows, -1, group).abs().amax(-1)
    torch.testing.assert_close(rows.scales[:num_rows], largest / 127, rtol=1e-6, atol=0.0)
    assert torch.equal(rows.sums, grouped.sum(-1, dtype=torch.int32))
    assert not rows.values[num_rows].any(), "the row after the last was written to"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How 3 heads of q and 2 of k are normalised and turned.

    span:  of norms: head, all, or none
    """

    head_dim: int = 16
    num_pairs: int = 8
    interleaved: bool = False
    span: str = "none"
    is_centered: bool = False

    def draw_norms(self) -> list[NormWeights]:
        """Return the norms of q and of k, with a weight of its own for each element."""
        return [
            NormWeights(
                weight=torch.randn(heads * self.head_dim),
                bias=torch.randn(heads * self.head_dim) if self.is_centered else None,
                epsilon=NORM_EPS,
                span=self.head_dim if self.span == "head" else None,
                is_centered=self.is_centered,
            )
            for heads in (3, 2)
            if self.span != "none"
        ]


def normalise(norm: NormWeights, heads: Tensor) -> Tensor:
    """Normalise heads [T, heads, head_dim] in float64."""
    spans = heads.double().reshape(len(heads), -1, norm.span or len(norm.weight))
    if norm.is_centered:
        spans = spans - spans.mean(-1, keepdim=True)
    factors = (spans.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    made = (spans * factors).flatten(1) * norm.weight
    return (made if norm.bias is None else made + norm.bias).view(heads.shape)


def rotate(
    team: Team,
    qkv: Tensor,
    positions: Tensor,
    angles: Tensor,
    norms: list[NormWeights],
    interleaved: bool,
) -> Tensor:
    """Rotate 3 heads of q and 2 of k; returns them with v, [T, 7, head_dim]."""
    head_dim = qkv.shape[2]
    cache = PagedCache.allocate(
        team,
        num_layers=1,
        num_pages=2,
        page_size=16,
        num_kv_heads=2,
        head_dim=head_dim,
        format=Format.F32,
    )
    buffer = torch.zeros(len(qkv) + 1, 7 * head_dim + 3)
    buffer[:-1, : 7 * head_dim] = qkv.flatten(1)
    batch = make_batch(len(qkv))
    batch.positions[:] = positions.numpy()
    batch.slots[:] = range(16, 16 + len(qkv))
    program = Program(team, batch)
    program.rotate_and_store(
        buffer,
        cache,
        0,
        num_heads=3,
        cosines=angles.cos(),
        sines=angles.sin(),
        interleaved=interleaved,
        norms=(norms[0], norms[1]) if norms else None,
    )
    program.run(len(qkv), 1, 0)
    assert not buffer[-1].any()
    assert not buffer[:, 7 * head_dim :].any()
    return buffer[:-1, : 7 * head_dim].view(qkv.shape)


@pytest.mark.parametrize(
    "rotation",
    [
        *(
            Rotation(head_dim=size, num_pairs=size // 2, span=span)
            for size in (8, 16, 64, 80, 96, 128)
            for span in ("none", "head")
        ),
        Rotation(head_dim=80, num_pairs=10),
        Rotation(head_dim=80, num_pairs=40, interleaved=True),
        Rotation(head_dim=64, num_pairs=16, interleaved=True),
        Rotation(head_dim=80, num_pairs=40, span="all"),
        Rotation(head_dim=24, num_pairs=12, span="head", is_centered=True),
        Rotation(head_dim=24, num_pairs=4, span="all", is_centered=True),
    ],
    ids=str,
)
def test_heads_are_normalised_and_rotated(each_team: Team, rotation: Rotation) -> None:
    torch.manual_seed(rotation.head_dim)
    qkv, positions = torch.randn(16, 7, rotation.head_dim), torch.randperm(40)[:16]
    angles = torch.rand(40, rotation.num_pairs) * 6
    norms = rotation.draw_norms()

    rotated = rotate(each_team, qkv, positions, angles, norms, rotation.interleaved)

    heads = [qkv[:, :3].double(), qkv[:, 3:5].double()]
    if norms:
        heads = [normalise(norm, each) for norm, each in zip(norms, heads, strict=True)]
    at_positions = angles[positions].double()
    expected = apply_rope(
        torch.cat(heads, 1),
        at_positions.cos(),
        at_positions.sin(),
        interleaved=rotation.interleaved,
    )
    torch.testing.assert_close(rotated[:, :5].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(rotated[:, 5:], qkv[:, 5:])


def test_part_of_a_program_runs_alone(team: Team) -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    first, second = (Rows.allocate(team, Format.F32, 3, 64) for _ in range(2))
    program = Program(team, make_batch(3))
    norm = NormWeights(weight=weight, epsilon=NORM_EPS)
    program.norm(x, norm, first)
    program.norm(x, norm, second)
    assert len(program) == 2

    program.run(3, 0, 0, first=1)

    assert not first.values.any()
    assert second.values.any()

    program.run(3, 0, 0, last=1)

    assert torch.equal(first.values, second.values)
