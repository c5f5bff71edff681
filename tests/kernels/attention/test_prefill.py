from typing import Any

import pytest
import torch

from remora.kernels.attention import prefill as attention_prefill
from remora.kernels.attention.prefill import attend_prefill
from tests.kernels.naive_attention import attend_naively

# Products and weights are rounded to the dtype; values are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def check(
    num_tokens: int,
    context_len: int,
    *,
    page_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    **rule: Any,
) -> None:
    """Compare with naive attention; `rule` as in `attend_naively`."""
    torch.manual_seed(num_tokens)
    num_pages = -(-context_len // page_size)
    table = (torch.randperm(num_pages) + 1).tolist()
    pages = torch.randn(2, num_pages + 1, page_size, heads[1], 16).to(dtype)
    query = torch.randn(num_tokens, heads[0], 16).to(dtype)

    attended = attend_prefill(
        query, pages, torch.tensor(table), context_len=context_len, scale=0.25, **rule
    )

    assert attended.dtype == dtype
    for token in range(num_tokens):
        at = context_len - num_tokens + token
        expected = attend_naively(query[token], pages, table, at, scale=0.25, **rule)
        torch.testing.assert_close(
            attended[token].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lens", [(1, 1), (2, 40), (40, 40), (17, 50)])
def test_prefill_agrees_with_naive_attention(
    lens: tuple[int, int],
    dtype: torch.dtype,
    heads: tuple[int, int],
    page_size: int,
    window: int | None,
) -> None:
    check(*lens, page_size=page_size, heads=heads, dtype=dtype, window=window)


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (9, False), (30, False), (9, True)])
def test_prefill_in_several_query_blocks_agrees_too(
    monkeypatch: pytest.MonkeyPatch, window: int | None, chunked: bool
) -> None:
    monkeypatch.setattr(attention_prefill, "SCORE_BUDGET", 1)

    check(45, 70, page_size=4, heads=(6, 2), window=window, chunked=chunked)
