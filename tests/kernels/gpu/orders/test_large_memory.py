"""Addresses are right in memory of more than 2^31 elements: pools of 100 GB, experts, logits.

The memory is mapped and mostly untouched. Results are compared with those on the same rows in
little memory, bit for bit; an offset that overflows would meet other memory, or none.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.kernels.attention.decode import attend_decode_paged
from remora.kernels.attention.mla import attend_latents, extend_over_latents
from remora.kernels.attention.prefill import attend_extend
from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device
from remora.kernels.gpu import moe as moe_kernels
from remora.kernels.gpu.moe_align import align
from remora.kernels.grammar_mask import mask_tokens_on_device
from remora.kernels.kv_store import store_kv
from remora.kernels.moe_rules import SILU
from remora.kernels.rope_store import rotate_and_store
from remora.kernels.sampling import add_at, penalize
from tests.kernels.gpu.devices import interpreted_only
from tests.kernels.gpu.orders.cases import few_programs
from tests.kernels.gpu.orders.watching import Program, watched

pytestmark = interpreted_only

BF16 = torch.bfloat16
GB = 10**9
PAGE, KV_HEADS, DIM = 16, 2, 64
LENGTHS = (3, 17, 20)
LARGE = 2**31  # elements


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    few_programs(monkeypatch)


def mapped(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"this machine maps no memory that it does not have: {error}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def tables_of(num_pages: int) -> tuple[Tensor, Tensor]:
    """Return tables of rows that use the last pages in reverse, and the slots of their tokens."""
    needed = [-(-length // PAGE) for length in LENGTHS]
    tables = torch.zeros(len(LENGTHS), max(needed), dtype=torch.int32)
    page, slots = num_pages - 1, []
    for row, (length, count) in enumerate(zip(LENGTHS, needed, strict=True)):
        tables[row, :count] = torch.arange(page, page - count, -1)
        at = torch.arange(length)
        slots.append(tables[row, at // PAGE].long() * PAGE + at % PAGE)
        page -= count
    return tables, torch.cat(slots)


def attended(num_pages: int, dtype: torch.dtype) -> list[Tensor]:
    """Store tokens in both ways, decode and extend."""
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    pages = mapped(2, num_pages, PAGE, KV_HEADS, DIM, dtype=dtype)
    scales = None
    if dtype == torch.int8:
        scales = mapped(2, num_pages, PAGE, KV_HEADS, dtype=torch.bfloat16)
    tables, slots = tables_of(num_pages)
    qkv, angles = torch.randn(num_tokens, 8, DIM).to(BF16), torch.rand(num_tokens, DIM // 2)
    query, key, value = qkv.tensor_split((4, 6), dim=1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    half = num_tokens // 2
    rotated = rotate_and_store(
        query, key, value, cos, sin, pages, slots, scales=scales, norms=None, eps=1e-6
    )
    store_kv(key[half:], value[half:], pages, slots[half:], scales)
    how: dict[str, Any] = {"scale": 0.2, "window": None, "kv_scales": scales}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    starts = torch.tensor((0, *torch.tensor(LENGTHS).cumsum(0)), dtype=torch.int32)
    decoded = attend_decode_paged(rotated[: len(LENGTHS)], pages, tables, lengths, **how)
    out = torch.empty_like(rotated)
    attend_extend(rotated, pages, tables, starts, lengths, out=out, **how)
    return [rotated, decoded, out]


def check_same(made: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for each, other in zip(made, expected, strict=True):
        assert not each.is_floating_point() or bool(each.isfinite().all())
        assert torch.equal(each, other)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.int8, marks=pytest.mark.slow)])
def test_rows_at_the_end_of_a_pool_of_100_gb(dtype: torch.dtype) -> None:
    num_pages = 100 * GB // (2 * PAGE * KV_HEADS * DIM * dtype.itemsize)
    assert num_pages * PAGE * KV_HEADS * DIM > LARGE

    with watched():
        check_same(attended(num_pages, dtype), attended(8, dtype))


def over_latents(num_pages: int) -> list[Tensor]:
    torch.manual_seed(0)
    pages = mapped(num_pages, PAGE, 48, dtype=BF16)
    tables, slots = tables_of(num_pages)
    pages.view(-1, 48)[slots] = torch.randn(len(slots), 48).to(BF16)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    query = torch.randn(9, 4, 48).to(BF16)
    starts = torch.tensor((0, 1, 4, 9), dtype=torch.int32)
    how: dict[str, Any] = {"latent_size": 32, "scale": 0.2}
    return [
        attend_latents(query[:3], pages, tables, lengths, **how),
        extend_over_latents(query, pages, tables, starts, lengths, **how),
    ]


def test_latents_at_the_end_of_a_pool_of_100_gb() -> None:
    with watched():
        check_same(over_latents(100 * GB // (PAGE * 48 * 2)), over_latents(8))


def multiplied(num_experts: int) -> Tensor:
    """Multiply a token with the last of many experts; only the last tile of columns."""
    torch.manual_seed(0)
    inner, hidden = 2048, 7168
    weight = mapped(num_experts, 2 * inner, hidden, dtype=BF16)
    weight[-1, [inner - 1, -1]] = torch.randn(2, hidden).to(BF16) / 80
    x, ids = torch.randn(1, hidden).to(BF16), torch.tensor([[num_experts - 1]], dtype=torch.int32)
    launch = moe_kernels.launch_of(x, 1, weight)
    blocks = align(ids, num_experts, 0, launch.rows)
    y = torch.zeros(blocks.num_rows, inner, dtype=BF16)
    with watched(lambda programs: programs[-1:]):
        moe_kernels.multiply(x, weight, blocks, y, launch, ids, None, SILU)
    return y[:1, -launch.columns :]


def test_the_last_of_many_experts() -> None:
    num_experts = 256
    assert num_experts * 4096 * 7168 > LARGE

    made = multiplied(num_experts)

    assert made.count_nonzero() == 1
    check_same([made], [multiplied(1)])


def sampled(first_row: int) -> list[Tensor]:
    """Edit, choose and describe two rows of a vocabulary of 128 k after many others."""
    torch.manual_seed(0)
    vocab_size, num_rows = 128256, first_row + 2
    logits = mapped(num_rows, vocab_size, dtype=torch.float32)
    logits[-2:] = torch.randn(2, vocab_size) * 3
    lines = torch.tensor([num_rows - 1, num_rows - 2])
    amounts = torch.tensor([2.0, 3.0])
    mask_tokens_on_device(logits, lines[:1], torch.full((1, vocab_size // 32), 2**30 - 1).int())
    add_at(logits, lines, lines - first_row, amounts)
    penalties = {"repetition": amounts, "presence": amounts, "frequency": amounts}
    penalize(logits, lines, lines - first_row + 7, amounts, **penalties)

    def last_rows(programs: Sequence[Program]) -> list[Program]:
        return [program for program in programs if program[0] >= first_row]

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    with watched(last_rows):
        ids, faults = choose_on_device(
            logits,
            column(1, torch.float32),
            column(7, torch.int64),
            top_k=column(50, torch.int64),
            top_p=column(0.9, torch.float64),
            min_p=column(0, torch.float32),
        )
        described = token_logprobs_on_device(logits, ids, 3)
    return [logits[-2:].nan_to_num(), *(each[-2:] for each in (ids, faults, *described))]


@pytest.mark.slow
def test_the_last_of_many_rows_of_logits() -> None:
    first_row = 17_000
    assert first_row * 128256 > LARGE

    check_same(sampled(first_row), sampled(0))
