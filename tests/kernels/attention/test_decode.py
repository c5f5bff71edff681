from typing import Any

import pytest
import torch

from remora.kernels.attention.decode import attend_decode, plan_decode
from tests.kernels.naive_attention import attend_naively

# Products and weights are rounded to the dtype; values are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_rows(
    lens: list[int], page_size: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]], torch.Tensor]:
    """Return query, pages, each row's own pages, and the padded tables."""
    torch.manual_seed(sum(lens))
    needed = [-(-length // page_size) for length in lens]
    free = (torch.randperm(sum(needed)) + 1).tolist()
    tables = [[free.pop() for _ in range(count)] for count in needed]
    padded = torch.tensor([table + [0] * (max(needed) - len(table)) for table in tables])
    pages = torch.randn(2, sum(needed) + 1, page_size, num_kv_heads, 16).to(dtype)
    return torch.randn(len(lens), num_heads, 16).to(dtype), pages, tables, padded


def check(
    lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    max_slots: int = 4096,
    **rule: Any,
) -> None:
    """Compare with naive attention; `rule` as in `attend_naively`."""
    query, pages, tables, padded = make_rows(lens, page_size, *heads, dtype)

    plan = plan_decode(padded, torch.tensor(lens), page_size=page_size, max_slots=max_slots, **rule)
    attended = attend_decode(query, pages, plan, scale=0.25)

    assert attended.dtype == dtype
    for row, length in enumerate(lens):
        expected = attend_naively(query[row], pages, tables[row], length - 1, scale=0.25, **rule)
        torch.testing.assert_close(
            attended[row].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (7, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("window", "max_slots"), [(None, 4096), (None, 40), (5, 4096), (33, 1)])
def test_decode_agrees_with_naive_attention_on_ragged_rows(
    dtype: torch.dtype,
    heads: tuple[int, int],
    page_size: int,
    window: int | None,
    max_slots: int,
) -> None:
    check(
        [1, 2, 16, 17, 31, 100],
        heads=heads,
        page_size=page_size,
        dtype=dtype,
        max_slots=max_slots,
        window=window,
    )


@pytest.mark.parametrize("chunk", [1, 8, 15, 32])
def test_decode_in_chunks_agrees_with_naive_attention(chunk: int) -> None:
    check([1, 15, 16, 17, 32, 33, 64], window=chunk, chunked=True)


def test_rows_of_like_length_share_a_bucket_and_a_long_one_does_not_join_them() -> None:
    lens = torch.tensor([20, 1000, 25, 30])
    table = torch.arange(4 * 63).view(4, 63)

    plan = plan_decode(table, lens, page_size=16, window=None, max_slots=4096)

    gathered = sorted(bucket.num_rows * bucket.num_slots for bucket in plan.buckets)
    assert gathered == [3 * 30, 1000]


def test_rows_of_a_large_batch_are_gathered_a_bounded_number_at_a_time() -> None:
    lens = torch.tensor([30, 25, 28, 200, 31, 27])

    plan = plan_decode(
        torch.arange(6 * 13).view(6, 13), lens, page_size=16, window=None, max_slots=64
    )

    assert [bucket.num_rows for bucket in plan.buckets] == [2, 2, 1, 1]


def test_pages_before_the_window_are_not_gathered() -> None:
    table = torch.arange(1, 64).view(1, 63)

    plan = plan_decode(table, torch.tensor([1000]), page_size=16, window=20, max_slots=4096)

    assert plan.buckets[0].page_ids.tolist() == table[0, 980 // 16 : 63].tolist()


def test_values_in_slots_past_the_end_of_a_row_do_not_matter() -> None:
    query, pages, tables, padded = make_rows([5, 16], 16, 4, 2, torch.float32)
    plan = plan_decode(padded, torch.tensor([5, 16]), page_size=16, window=None, max_slots=4096)
    before = attend_decode(query, pages, plan, scale=0.25)

    pages[:, tables[0][0], 5:] = 1e30
    pages[:, 0] = -1e30

    assert torch.equal(attend_decode(query, pages, plan, scale=0.25), before)
