"""The kernel of extending attention against the torch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels.gpu.attention import prefill as kernels
from tests.kernels.gpu.devices import interpreted_only, on_devices, on_gpu
from tests.kernels.gpu.paged import (
    SHAPES,
    TOLERANCES,
    Paged,
    Row,
    attend_rows,
    check_rows,
    make_paged,
    starts_of,
)


def check(rows: list[Row], **options: Any) -> None:
    check_rows(rows, decodes=False, **options)


@on_devices
@pytest.mark.parametrize(("rows", "options"), SHAPES, ids=str)
def test_every_shape_and_rule_agrees_with_torch(
    device: str, rows: list[Row], options: dict[str, Any]
) -> None:
    check(rows, device=device, **options)


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_any_length_agree_with_torch(device: str, dtype: torch.dtype) -> None:
    rows = [(0, 0), (1, 1), (17, 17), (0, 9), (1, 200), (15, 16), (70, 145), (0, 0)]

    check(rows, heads=(6, 2), dtype=dtype, device=device)


@on_devices
@pytest.mark.parametrize("window", [None, 40])
def test_a_prompt_is_the_same_bits_however_it_is_cut(
    device: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together with other rows as well. In bfloat16, because numpy, which interprets, sums the
    float32 rows of a tile in varying order.
    """
    small = kernels.PrefillLaunch(queries=32, keys=16, num_warps=4, num_stages=2)
    monkeypatch.setattr(kernels, "launch_of", lambda *shape: small)
    torch.manual_seed(0)
    dtype = torch.bfloat16
    paged = make_paged(
        [90, 40], page_size=16, num_kv_heads=1, head_dim=16, dtype=dtype, device=device
    )
    query = torch.randn(130, 3, 16, device=device).to(dtype)

    together = attend_rows(query, paged, starts_of([(90, 90), (40, 40)], 0, device), window=window)

    begin = 0
    for count in (7, 1, 61, 21):
        end = begin + count
        length = torch.tensor([end], dtype=torch.int32, device=device)
        chunk = Paged(paged.kv_pages, None, paged.tables[:1], length)
        starts = starts_of([(count, end)], 0, device)
        attended = attend_rows(query[begin:end], chunk, starts, window=window)
        assert torch.equal(attended, together[begin:end])
        begin = end


@on_devices
@pytest.mark.parametrize("window", [1, 7, 20, 64])
def test_pages_that_lie_behind_the_window_are_not_read(window: int, device: str) -> None:
    torch.manual_seed(window)
    count, length = 9, 150
    paged = make_paged(
        [length], page_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    query, starts = (
        torch.randn(count, 2, 16, device=device),
        starts_of([(count, length)], 0, device),
    )
    expected = attend_rows(query, paged, starts, window=window)

    first = (length - count - window + 1) // 4
    paged.kv_pages[:, paged.tables[0, :first].long()] = torch.nan

    assert torch.equal(attend_rows(query, paged, starts, window=window), expected)


@on_devices
@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_tokens_are_no_launch(device: str, num_rows: int) -> None:
    paged = make_paged(
        [1], page_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    rows = Paged(paged.kv_pages, None, paged.tables[:num_rows], paged.lengths[:num_rows])
    starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    assert attend_rows(torch.empty(0, 1, 16, device=device), rows, starts).shape == (0, 1, 16)


@interpreted_only
@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 60)), min_size=1, max_size=4),
    group=st.integers(1, 7),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 16, 24, 40]),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from(list(TOLERANCES)),
    window=st.none() | st.integers(1, 100),
    soft_cap=st.none() | st.floats(1, 50),
)
def test_ragged_rows_agree_with_torch(
    rows: list[tuple[int, int]], group: int, num_kv_heads: int, **options: Any
) -> None:
    """Of tokens and of context before them."""
    extended = [(count, count + before) for count, before in rows]
    check(extended, heads=(group * num_kv_heads, num_kv_heads), **options)


@on_gpu
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_real_sizes_agree_with_torch_on_a_gpu(head_dim: int, window: int | None) -> None:
    check(
        [(1, 4000), (1500, 1500), (0, 0), (700, 3001), (129, 129)],
        heads=(16, 4),
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cuda",
        window=window,
    )


def test_tiles_hold_every_token_of_every_row() -> None:
    """As many as the grid has, whatever the rows: the bound that the launch relies on."""
    torch.manual_seed(0)
    for _ in range(200):
        group, queries = int(torch.randint(1, 72, ())), 128
        counts = torch.randint(0, 200, (int(torch.randint(1, 9, ())),)).tolist()
        tiles = sum(-(-count * group // queries) for count in counts)
        assert tiles <= kernels.num_tiles(len(counts), sum(counts), group, queries)
