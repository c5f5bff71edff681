"""Kernels of decoding and extending attention against the torch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels.attention.decode import attend_decode_paged, attend_decode_paged_reference
from remora.kernels.gpu.arch import Arch
from remora.kernels.gpu.attention import decode, prefill
from tests.kernels.gpu.devices import INTERPRETED, interpreted_only, on_gpu
from tests.kernels.gpu.paged import (
    SHAPES,
    TOLERANCES,
    Paged,
    Row,
    attend_rows,
    check_rows,
    launch_few_programs,
    make_paged,
    starts_of,
)

BOTH = pytest.mark.parametrize("decodes", [True, False], ids=["decode", "extend"])


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        launch_few_programs(monkeypatch)


@BOTH
@pytest.mark.parametrize(("rows", "options"), SHAPES, ids=str)
def test_every_shape_and_rule_agrees_with_torch(
    device: str, rows: list[Row], options: dict[str, Any], decodes: bool
) -> None:
    check_rows(rows, decodes=decodes, device=device, **options)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("decodes", "rows"),
    [
        (True, [(1, length) for length in (0, 1, 15, 16, 17, 300, 1)]),
        (True, [(1, 1)] * 12 + [(1, 1100)] + [(1, 3)] * 5),
        (False, [(0, 0), (1, 1), (17, 17), (0, 9), (1, 200), (15, 16), (70, 145), (0, 0)]),
    ],
    ids=["decode short rows", "decode a long row", "extend"],
)
def test_rows_of_any_length_agree_with_torch(
    device: str, dtype: torch.dtype, rows: list[Row], decodes: bool
) -> None:
    check_rows(rows, decodes=decodes, heads=(6, 2), dtype=dtype, device=device)


def test_a_row_may_have_more_splits_than_are_merged_at_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MERGE_SPLITS", 2)

    check_rows([(1, 1100)], decodes=True, device=device, fixed_splits=(False,))


@pytest.mark.parametrize("fixed_split", [False, True])
def test_a_window_of_one_split_is_not_merged(
    device: str, fixed_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of a plan with room for further splits."""
    torch.manual_seed(0)
    paged = make_paged([300, 5, 0, 129], device=device)
    query = torch.randn(4, 2, 16, device=device)
    window = decode.MIN_SPLIT
    options: dict[str, Any] = {"window": window, "fixed_split": fixed_split}
    roomy = decode.plan_items(
        paged.lengths, 9, 5, window=window, fixed_split=False, min_split=window, keys=16
    )
    expected = attend_rows(query, paged, plan=roomy, **options)

    with monkeypatch.context() as patch:
        patch.delattr(decode, "merge_kernel")
        alone = attend_rows(query, paged, split_tokens=window, **options)

    assert torch.equal(alone, expected)
    assert (roomy.items[4:, 0] == -1).all()


def test_a_decoded_row_has_the_same_bits_in_any_batch(device: str) -> None:
    torch.manual_seed(0)
    lengths = [40, 700, 7]
    paged = make_paged(lengths, device=device)
    query = torch.randn(len(lengths), 2, 16, device=device)

    together = attend_rows(query, paged, fixed_split=True)

    for row, length in enumerate(lengths):
        rows = slice(row, row + 1)
        tables = paged.tables[rows, : -(-length // 16)]
        alone = Paged(paged.kv_pages, None, tables, paged.lengths[rows])
        assert torch.equal(attend_rows(query[rows], alone, fixed_split=True)[0], together[row])


@pytest.mark.parametrize("window", [None, 40])
def test_a_prompt_has_the_same_bits_for_any_chunks_and_batch(
    device: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: numpy, which interprets, sums the float32 rows of a tile in varying order."""
    small = prefill.PrefillLaunch(queries=32, keys=16, num_warps=4, num_stages=2)
    monkeypatch.setattr(prefill, "launch_of", lambda *shape: small)
    torch.manual_seed(0)
    paged = make_paged([90, 40], dtype=torch.bfloat16, device=device)
    query = torch.randn(130, 3, 16, device=device).bfloat16()

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


@pytest.mark.parametrize("window", [1, 7, 20, 64])
def test_pages_before_the_window_are_not_read(window: int, device: str) -> None:
    torch.manual_seed(window)
    count, length = 9, 150
    paged = make_paged([length], page_size=4, device=device)
    query = torch.randn(count, 2, 16, device=device)
    starts = starts_of([(count, length)], 0, device)
    expected = attend_rows(query, paged, starts, window=window)

    first = (length - count - window + 1) // 4
    paged.kv_pages[:, paged.tables[0, :first].long()] = torch.nan

    assert torch.equal(attend_rows(query, paged, starts, window=window), expected)


@pytest.mark.parametrize(("decodes", "num_rows"), [(True, 0), (False, 0), (False, 1)])
def test_a_step_without_tokens_launches_nothing(device: str, decodes: bool, num_rows: int) -> None:
    paged = make_paged([1], page_size=4, device=device)
    rows = Paged(paged.kv_pages, None, paged.tables[:num_rows], paged.lengths[:num_rows])
    starts = None if decodes else torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    assert attend_rows(torch.empty(0, 1, 16, device=device), rows, starts).shape == (0, 1, 16)


@interpreted_only
@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 160)), min_size=1, max_size=4),
    group=st.integers(1, 20),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 16, 24, 40]),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from(list(TOLERANCES)),
    window=st.none() | st.integers(1, 200),
    soft_cap=st.none() | st.floats(1, 50),
)
def test_ragged_rows_agree_with_torch(
    rows: list[Row], group: int, num_kv_heads: int, **options: Any
) -> None:
    """rows: new tokens, and tokens before them."""
    extended = [(count, count + before) for count, before in rows]
    for decodes in (True, False):
        heads = group * num_kv_heads, num_kv_heads
        check_rows(extended, decodes=decodes, heads=heads, **options)


@interpreted_only
def test_pages_that_a_gpu_cannot_convert_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.kernels.gpu.arch.arch_of", lambda device: Arch.AMPERE)

    with pytest.raises(ValueError, match="float8_e4m3fn"):
        check_rows([(1, 1)], decodes=True, kv_dtype=torch.float8_e4m3fn)


@on_gpu
@pytest.mark.parametrize(
    ("decodes", "rows", "options"),
    [
        (
            True,
            [(1, length) for length in (8192, 1, 1023, 1024, 1025, 17000, *[700] * 58)],
            {"heads": (32, 8), "head_dim": 128},
        ),
        *(
            (
                False,
                [(1, 4000), (1500, 1500), (0, 0), (700, 3001), (129, 129)],
                {"heads": (16, 4), "head_dim": head_dim, "window": window},
            )
            for head_dim in (64, 128, 256)
            for window in (None, 1024)
        ),
    ],
    ids=str,
)
def test_real_sizes_agree_with_torch_on_a_gpu(
    decodes: bool, rows: list[Row], options: dict[str, Any]
) -> None:
    check_rows(rows, decodes=decodes, dtype=torch.bfloat16, device="cuda", **options)


def test_tiles_hold_every_token_of_every_row() -> None:
    """The grid has as many tiles as any rows need."""
    torch.manual_seed(0)
    for _ in range(200):
        group, queries = int(torch.randint(1, 72, ())), 128
        counts = torch.randint(0, 200, (int(torch.randint(1, 9, ())),)).tolist()
        tiles = sum(-(-count * group // queries) for count in counts)
        assert tiles <= prefill.num_tiles(len(counts), sum(counts), group, queries)


@on_gpu
def test_a_captured_step_runs_again_with_other_rows() -> None:
    torch.manual_seed(0)
    paged = make_paged(
        [900, 3, 5000], num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda"
    )
    query = torch.randn(3, 8, 64, device="cuda").bfloat16()
    attend_rows(query, paged)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_decode_paged(
            query, paged.kv_pages, paged.tables, paged.lengths, scale=0.125, window=None
        )

    paged.tables.copy_(paged.tables.flip(0))
    paged.lengths.copy_(paged.lengths.flip(0))
    graph.replay()

    expected = attend_decode_paged_reference(
        query.double().cpu(), **paged.exact, scale=0.125, window=None
    )
    torch.testing.assert_close(out.double().cpu(), expected, atol=3e-2, rtol=3e-2)
