"""What the kernels of attention over pages are specified by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from remora.kernels.attention.decode import attend_decode_paged
from remora.kernels.attention.rows import attend_row, check_pages
from tests.kernels.naive_attention import attend_naively

PAGES = torch.zeros(2, 3, 4, 2, 8)
TABLE = torch.tensor([3, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("count", [1, 4, 11])
def test_each_token_agrees_with_naive_attention(count: int, window: int | None) -> None:
    torch.manual_seed(count)
    pages = torch.randn(2, 4, 4, 2, 16)
    pages[:, TABLE[2], 3] = float("nan")  # past the end
    query = torch.randn(count, 6, 16)

    attended = attend_row(query, pages, TABLE, 11, scale=0.3, window=window)

    for token, result in enumerate(attended):
        at = 11 - count + token
        expected = attend_naively(query[token], pages, TABLE.tolist(), at, scale=0.3, window=window)
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_cap_bounds_scores() -> None:
    query, pages = torch.ones(1, 1, 1), torch.zeros(2, 1, 2, 1, 1)
    pages[0, 0, :, 0, 0] = torch.tensor([-1000.0, 1000.0])
    pages[1, 0, :, 0, 0] = torch.tensor([0.0, 1.0])

    attended = attend_row(query, pages, torch.tensor([0]), 2, scale=1.0, window=None, soft_cap=2.0)

    torch.testing.assert_close(attended.squeeze(), torch.tensor(4.0).sigmoid())


def test_scales_belong_to_a_token_and_a_head() -> None:
    torch.manual_seed(0)
    pages = torch.randint(-127, 128, (2, 4, 4, 2, 16), dtype=torch.int8)
    scales = torch.rand(2, 4, 4, 2) / 50
    query = torch.randn(2, 4, 16)

    attended = attend_row(query, pages, TABLE, 9, scale=0.3, window=None, kv_scales=scales)

    plain = pages * scales.unsqueeze(-1)
    expected = attend_row(query, plain, TABLE, 9, scale=0.3, window=None)
    torch.testing.assert_close(attended, expected)


def test_decode_rows_are_attended_one_by_one_where_there_are_no_kernels() -> None:
    torch.manual_seed(0)
    pages, query, out = torch.randn(2, 4, 4, 2, 16), torch.randn(3, 4, 16), torch.empty(3, 4, 16)
    tables = torch.stack((TABLE, TABLE.flip(0), TABLE))
    lengths = torch.tensor([9, 1, 0], dtype=torch.int32)

    given = attend_decode_paged(query, pages, tables, lengths, scale=0.3, window=4, out=out)

    assert given is out
    for row in (0, 1):
        expected = attend_row(
            query[row : row + 1], pages, tables[row], int(lengths[row]), scale=0.3, window=4
        )
        assert torch.equal(out[row], expected[0])
    assert torch.equal(out[2], torch.zeros(4, 16))


@pytest.mark.parametrize(
    ("query", "pages", "scales", "reason"),
    [
        (torch.zeros(1, 2, 8), PAGES.half(), None, "pages of torch.float16 for queries of"),
        (torch.zeros(1, 3, 8), PAGES, None, "heads differ"),
        (torch.zeros(1, 2, 16), PAGES, None, "heads differ"),
        (torch.zeros(1, 2, 8), PAGES.to(torch.int8), None, "pages of int8 need scales"),
        (torch.zeros(1, 2, 8), PAGES, PAGES[..., 0], "scales for pages of torch.float32"),
        (torch.zeros(1, 2, 8), PAGES.to(torch.int8), PAGES[:, :2, :, :, 0], "scales of"),
        (torch.zeros(1, 2, 16)[..., ::2], PAGES, None, "contiguous"),
        (torch.zeros(1, 2, 8), PAGES.transpose(1, 2), None, "contiguous"),
    ],
)
def test_what_does_not_go_together_is_refused(
    query: torch.Tensor, pages: torch.Tensor, scales: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_pages(query, pages, scales)
