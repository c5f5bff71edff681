import pytest
import torch

from remora.kernels.attention import prefill as attention_prefill
from remora.kernels.attention.prefill import attend_prefill
from tests.kernels.naive_attention import attend_naively

# Products and weights are rounded to the dtype; values are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def attend_and_compare(
    *,
    num_tokens: int,
    context_len: int,
    page_size: int,
    heads: tuple[int, int],
    window: int | None,
    dtype: torch.dtype,
    chunked: bool = False,
) -> None:
    torch.manual_seed(num_tokens)
    num_pages = -(-context_len // page_size)
    table = (torch.randperm(num_pages) + 1).tolist()
    pages = torch.randn(2, num_pages + 1, page_size, heads[1], 16).to(dtype)
    query = torch.randn(num_tokens, heads[0], 16).to(dtype)

    attended = attend_prefill(
        query,
        pages,
        torch.tensor(table),
        context_len=context_len,
        scale=0.25,
        window=window,
        chunked=chunked,
    )

    assert attended.dtype == dtype
    for token in range(num_tokens):
        at = context_len - num_tokens + token
        expected = attend_naively(
            query[token], pages, table, at, scale=0.25, window=window, chunked=chunked
        )
        torch.testing.assert_close(
            attended[token].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("num_tokens", "context_len"), [(1, 1), (2, 40), (40, 40), (17, 50)])
def test_prefill_agrees_with_naive_attention(
    dtype: torch.dtype,
    heads: tuple[int, int],
    page_size: int,
    window: int | None,
    num_tokens: int,
    context_len: int,
) -> None:
    attend_and_compare(
        num_tokens=num_tokens,
        context_len=context_len,
        page_size=page_size,
        heads=heads,
        window=window,
        dtype=dtype,
    )


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (9, False), (30, False), (9, True)])
def test_prefill_in_several_query_blocks_agrees_too(
    monkeypatch: pytest.MonkeyPatch, window: int | None, chunked: bool
) -> None:
    monkeypatch.setattr(attention_prefill, "SCORE_BUDGET", 1)

    attend_and_compare(
        num_tokens=45,
        context_len=70,
        page_size=4,
        heads=(6, 2),
        window=window,
        dtype=torch.float32,
        chunked=chunked,
    )
