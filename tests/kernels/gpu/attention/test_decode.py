"""Kernels of decoding attention against the torch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels.attention.decode import attend_decode_paged, attend_decode_paged_reference
from remora.kernels.gpu.arch import Arch
from remora.kernels.gpu.attention import decode as kernels
from tests.kernels.gpu.devices import INTERPRETED, interpreted_only, on_devices, on_gpu
from tests.kernels.gpu.paged import (
    SHAPES,
    TOLERANCES,
    Paged,
    Row,
    attend_rows,
    check_rows,
    launch_few_programs,
    make_paged,
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        launch_few_programs(monkeypatch)


def check(lengths: list[int], **options: Any) -> None:
    check_rows([(1, length) for length in lengths], decodes=True, **options)


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "lengths", [[0, 1, 15, 16, 17, 300, 1], [1] * 12 + [1100] + [3] * 5], ids=len
)
def test_rows_of_any_length_agree_with_torch(
    device: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    check(lengths, heads=(6, 2), dtype=dtype, device=device)


@on_devices
@pytest.mark.parametrize(("rows", "options"), SHAPES, ids=str)
def test_every_shape_and_rule_agrees_with_torch(
    device: str, rows: list[Row], options: dict[str, Any]
) -> None:
    check_rows(rows, decodes=True, device=device, **options)


@on_devices
def test_a_row_may_have_more_splits_than_are_merged_at_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MERGE_SPLITS", 2)

    check([1100], device=device, fixed_splits=(False,))


@on_devices
def test_a_row_is_the_same_bits_whoever_is_beside_it(device: str) -> None:
    torch.manual_seed(0)
    lengths = [40, 700, 7]
    options: dict[str, Any] = {
        "num_kv_heads": 1,
        "head_dim": 16,
        "dtype": torch.float32,
        "device": device,
    }
    paged = make_paged(lengths, page_size=16, **options)
    query = torch.randn(len(lengths), 2, 16, device=device)

    together = attend_rows(query, paged, fixed_split=True)

    for row, length in enumerate(lengths):
        rows = slice(row, row + 1)
        pages = -(-length // 16)
        tables = paged.tables[rows, :pages]
        alone = Paged(paged.kv_pages, None, tables, paged.lengths[rows])
        assert torch.equal(attend_rows(query[rows], alone, fixed_split=True)[0], together[row])


@on_devices
def test_no_rows_are_no_launch(device: str) -> None:
    paged = make_paged(
        [1], page_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    empty = Paged(paged.kv_pages, None, paged.tables[:0], paged.lengths[:0])

    assert attend_rows(torch.empty(0, 1, 16, device=device), empty).shape == (0, 1, 16)


@interpreted_only
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 180), min_size=1, max_size=4),
    group=st.integers(1, 20),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([8, 16, 24, 40]),
    page_size=st.integers(1, 64),
    dtype=st.sampled_from(list(TOLERANCES)),
    window=st.none() | st.integers(1, 200),
    soft_cap=st.none() | st.floats(1, 50),
    fixed_splits=st.sampled_from([(False,), (True,)]),
)
def test_ragged_rows_agree_with_torch(
    lengths: list[int], group: int, num_kv_heads: int, **options: Any
) -> None:
    check(lengths, heads=(group * num_kv_heads, num_kv_heads), **options)


@interpreted_only
def test_a_gpu_that_cannot_convert_the_pages_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remora.kernels.gpu.attention.steps.arch_of", lambda device: Arch.AMPERE)

    with pytest.raises(ValueError, match="this GPU does not convert float8_e4m3fn; keep K and V"):
        check([1], kv_dtype=torch.float8_e4m3fn)


@on_gpu
def test_real_sizes_agree_with_torch_on_a_gpu() -> None:
    lengths = [8192, 1, 1023, 1024, 1025, 17000] + [700] * 58
    check(lengths, heads=(32, 8), head_dim=128, dtype=torch.bfloat16, device="cuda")


@on_gpu
def test_a_captured_step_runs_again_with_other_rows() -> None:
    torch.manual_seed(0)
    paged = make_paged(
        [900, 3, 5000], page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
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
