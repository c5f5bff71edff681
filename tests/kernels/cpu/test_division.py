"""Products divided among many threads: finely enough, and with the bits of one thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from remora.kernels.cpu.buffers import Rows
from remora.kernels.cpu.build import InstructionSet, best_instruction_set, read_cpu_flags
from remora.kernels.cpu.experts import Choices, multiply_experts, sort_pairs
from remora.kernels.cpu.latents import multiply_heads
from remora.kernels.cpu.library import Activation, Epilogue, Format, Team
from remora.kernels.cpu.packing import PACKED
from remora.kernels.cpu.program import Program
from remora.kernels.moe_rules import SILU
from tests.kernels.cpu.products import make_batch, make_rows, multiply, one_step, pack_alone

MANY_THREADS = 24
# Rows that a tile of registers has room for (`TILE_ROWS` in src/simd.h).
HAS_AVX512 = best_instruction_set(read_cpu_flags()) in (InstructionSet.AMX, InstructionSet.AVX512)
TILE_ROWS = 6 if HAS_AVX512 else 3


@pytest.mark.parametrize(
    ("epilogue", "activation"),
    [
        (Epilogue.STORE, Activation.LINEAR),
        (Epilogue.STORE, Activation.GELU),
        (Epilogue.ADD, Activation.LINEAR),
        (Epilogue.GATED, Activation.SILU),
        (Epilogue.GATED, Activation.GELU),
    ],
)
@pytest.mark.parametrize("format", PACKED)
def test_products_have_the_bits_of_one_thread(
    each_team: Team, format: Format, epilogue: Epilogue, activation: Activation
) -> None:
    torch.manual_seed(0)
    n, k, most = 200, 70, 40
    alone, many = Team(each_team.library, 1), Team(each_team.library, MANY_THREADS)
    weight = pack_alone(
        alone, torch.randn(n, k), torch.randn(n), format, gated=epilogue is Epilogue.GATED
    )
    rows = make_rows(alone, format, torch.randn(most, k))
    for count in (1, 7, most):
        start = torch.randn(count, n) if epilogue is Epilogue.ADD else None

        def run(team: Team, count: int = count, start: Tensor | None = start) -> Tensor:
            return multiply(
                team,
                rows,
                weight,
                count=count,
                epilogue=epilogue,
                activation=activation,
                start=start,
            )

        assert torch.equal(run(many), run(alone))
    many.close()


@pytest.mark.parametrize("format", PACKED)
def test_experts_have_the_bits_of_one_thread(each_team: Team, format: Format) -> None:
    torch.manual_seed(0)
    num_tokens, num_experts, k, inner = 3, 4, 70, 96
    results = []
    weights = torch.randn(num_experts, 2 * inner, k)
    x = torch.randn(num_tokens * 2, k)
    for num_threads in (1, MANY_THREADS):
        team = Team(each_team.library, num_threads)
        choices = Choices.allocate(num_tokens=num_tokens, num_experts=num_experts, top_k=2)
        choices.ids[:] = torch.tensor([[0, 1], [3, 0], [0, 3]])
        packed = [pack_alone(team, weight, None, format, gated=True) for weight in weights]
        out = torch.zeros(len(x), packed[0].out_columns)
        with one_step(team, num_tokens) as program:
            sort_pairs(program, choices)
            multiply_experts(program, make_rows(team, format, x), packed, out, choices, gating=SILU)
        results.append(out)
        team.close()

    assert results[0].any()
    assert torch.equal(*results)


@pytest.mark.parametrize("num_tokens", [1, 33])
def test_heads_have_the_bits_of_one_thread(each_team: Team, num_tokens: int) -> None:
    torch.manual_seed(0)
    heads, n, k = 3, 96, 40
    results = []
    weights, x = torch.randn(heads, n, k), torch.randn(num_tokens, heads * k)
    for num_threads in (1, MANY_THREADS):
        team = Team(each_team.library, num_threads)
        packed = [pack_alone(team, weight, None, Format.F32) for weight in weights]
        out = torch.zeros(num_tokens, heads * 128)
        with one_step(team, num_tokens) as program:
            multiply_heads(program, make_rows(team, Format.F32, x), k, packed, out, 128)
        results.append(out)
        team.close()

    assert results[0].any()
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("num_rows", "num_panels", "num_threads", "expected"),
    [
        (1, 6, 2, 6),  # enough panels
        (1, 5, 2, 10),  # halves
        (1, 6, 8, 24),  # quarters: vectors
        (1, 1, 64, 4),  # never narrower
        (2 * TILE_ROWS, 2, 8, 16),  # two tiles of rows, too
        (64, 12, 8, 24),  # rows, so that panels stay whole
        (64, 2, 2, 8),  # many rows: as many for each thread
        (0, 2, 2, 0),
    ],
)
def test_columns_are_divided_until_each_thread_has_three_chunks(
    team: Team, num_rows: int, num_panels: int, num_threads: int, expected: int
) -> None:
    """Of floats, which no instruction set multiplies by tiles."""
    many = Team(team.library, num_threads)
    weight = pack_alone(many, torch.randn(num_panels * 64, 8), None, Format.F32)
    program = Program(many, make_batch(64))
    rows = Rows.allocate(many, Format.F32, 64, 8)
    program.multiply(rows, weight, torch.empty(64, weight.out_columns))

    assert program.num_chunks(num_rows, 0, 0) == [expected]
    many.close()
