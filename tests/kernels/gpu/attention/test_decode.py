"""Kernels of decoding attention against the torch code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.attention.decode import attend_decode_paged, attend_decode_paged_reference
from remora.kernels.gpu.arch import Arch
from remora.kernels.gpu.attention import decode as kernels
from tests.kernels.gpu.devices import INTERPRETED, interpreted_only, on_devices, on_gpu, poisoned
from tests.kernels.gpu.paged import (
    NARROW_TOLERANCES,
    TOLERANCES,
    Paged,
    launch_few_programs,
    make_paged,
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        launch_few_programs(monkeypatch)


def attend(query: Tensor, paged: Paged, **options: Any) -> Tensor:
    """Attend parts of wider tokens into parts of wider memory full of NaN."""
    num_tokens, num_heads, head_dim = query.shape
    shape = num_tokens, num_heads + 5, head_dim
    wide = poisoned(*shape, dtype=query.dtype, device=str(query.device))
    wide_query = torch.cat((wide[:, :1], query, wide[:, :2]), dim=1)
    out = wide[:, 3:-2]
    given = attend_decode_paged(
        wide_query[:, 1:-2],
        paged.kv_pages,
        paged.tables,
        paged.lengths,
        kv_scales=paged.kv_scales,
        out=out,
        **{"scale": query.shape[-1] ** -0.5, "window": None, **options},
    )
    assert given is out
    assert wide[:, :3].isnan().all()
    assert wide[:, -2:].isnan().all()
    return out


def check(
    lengths: list[int],
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    scaled: bool = False,
    device: str = "cpu",
    window: int | None = None,
    soft_cap: float | None = None,
    with_sinks: bool = False,
    fixed_split: bool = False,
) -> None:
    """Attend rows of these lengths; compare with the torch code in float64."""
    torch.manual_seed(sum(lengths))
    num_heads, num_kv_heads = heads
    paged = make_paged(
        lengths,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=kv_dtype or dtype,
        device=device,
        scaled=scaled,
    )
    query = torch.randn(len(lengths), num_heads, head_dim, device=device).to(dtype)
    options = {"scale": 1.5 * head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    sinks = torch.randn(num_heads) * 3 if with_sinks else None

    to = None if sinks is None else sinks.to(device)
    out = attend(query, paged, fixed_split=fixed_split, sinks=to, **options)
    expected = attend_decode_paged_reference(
        query.double().cpu(), **paged.exact, sinks=sinks, **options
    )

    tolerance = (TOLERANCES if kv_dtype is None else NARROW_TOLERANCES)[dtype]
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@on_devices
@pytest.mark.parametrize("fixed_split", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_any_length_agree_with_torch(
    device: str, dtype: torch.dtype, fixed_split: bool
) -> None:
    check(
        [0, 1, 15, 16, 17, 300, 1],
        heads=(6, 2),
        dtype=dtype,
        device=device,
        fixed_split=fixed_split,
    )


@on_devices
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        *(([size - 1, size, size + 1, 130], {"page_size": size}) for size in (1, 2, 5, 32, 64)),
        *(([19], {"heads": heads}) for heads in ((9, 3), (7, 1), (33, 1), (142, 2))),
        *(
            ([3, 70], {"head_dim": size, "dtype": torch.bfloat16})
            for size in (64, 80, 96, 128, 256)
        ),
        *(([0, 1, 16, 17, 301], {"window": window}) for window in (1, 16, 100, 300)),
        *(
            (
                [0, 1, 40, 300],
                {"heads": (6, 2), "window": window, "with_sinks": True, "fixed_split": fixed},
            )
            for window in (None, 20)
            for fixed in (False, True)
        ),
        *(
            ([1, 40, 200], {"soft_cap": cap, "window": window})
            for cap in (0.5, 30.0)
            for window in (None, 20)
        ),
    ],
    ids=str,
)
def test_every_shape_and_rule_agrees_with_torch(
    device: str, lengths: list[int], options: dict[str, Any]
) -> None:
    check(lengths, device=device, **options)


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("kv_dtype", "scaled"),
    [
        (torch.int8, True),
        (torch.float8_e4m3fn, True),
        (torch.float8_e4m3fn, False),
        (torch.float8_e5m2, False),
    ],
)
def test_pages_of_8_bits_are_multiplied_by_their_scales(
    device: str, kv_dtype: torch.dtype, scaled: bool, dtype: torch.dtype
) -> None:
    check([1, 70], dtype=dtype, kv_dtype=kv_dtype, scaled=scaled, device=device)


@on_devices
@pytest.mark.parametrize("fixed_split", [False, True])
def test_a_long_row_among_many_is_divided(device: str, fixed_split: bool) -> None:
    """More rows than the shortest vector of them holds."""
    check([1] * 12 + [1100] + [3] * 5, device=device, fixed_split=fixed_split)


@on_devices
def test_a_row_may_have_more_splits_than_are_merged_at_once(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MERGE_SPLITS", 2)

    check([1100], device=device)


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

    together = attend(query, paged, fixed_split=True)

    for row, length in enumerate(lengths):
        rows = slice(row, row + 1)
        pages = -(-length // 16)
        tables = paged.tables[rows, :pages]
        alone = Paged(paged.kv_pages, None, tables, paged.lengths[rows])
        assert torch.equal(attend(query[rows], alone, fixed_split=True)[0], together[row])


@on_devices
def test_no_rows_are_no_launch(device: str) -> None:
    paged = make_paged(
        [1], page_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    empty = Paged(paged.kv_pages, None, paged.tables[:0], paged.lengths[:0])

    assert attend(torch.empty(0, 1, 16, device=device), empty).shape == (0, 1, 16)


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
    fixed_split=st.booleans(),
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
    for fixed_split in (False, True):
        check(
            lengths,
            heads=(32, 8),
            head_dim=128,
            dtype=torch.bfloat16,
            device="cuda",
            fixed_split=fixed_split,
        )


@on_gpu
def test_a_captured_step_runs_again_with_other_rows() -> None:
    torch.manual_seed(0)
    paged = make_paged(
        [900, 3, 5000], page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    query = torch.randn(3, 8, 64, device="cuda").bfloat16()
    attend(query, paged)
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
