"""The one launch between projection and attention against norm, rotation and storing in torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.kv_store import GREATEST, SCALE_DTYPE
from remora.kernels.rope_store import rotate_and_store, rotate_and_store_reference
from tests.kernels.gpu.devices import interpreted_only, poisoned_memory
from tests.kernels.gpu.test_kv_store import as_bytes, make_pages
from tests.kernels.gpu.test_rope import angles
from tests.thinned import thinned

# Units in the last place of numbers up to about 8: one of the norm, one of its weight, one of the
# rotation; of float32 also those of sums.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 3 * 2**-8, torch.bfloat16: 3 * 2**-5}
# Of what is read back from heads of up to 8: half a step of int8, a sixteenth of a number of e4m3.
STEPS = {torch.int8: 8 / 126 / 2, torch.float8_e4m3fn: 8 / 16, torch.float8_e5m2: 8 / 8}
PAGE_SIZE, EPS = 4, 1e-6


def check(
    fused: Tensor,
    num_kv_heads: int,
    slots: Tensor,
    stored: torch.dtype,
    *,
    pairs: int,
    has_norms: bool,
    interleaved: bool = False,
    static_scales: Tensor | None = None,
) -> None:
    """Compare queries, slots that are written to, and slots that are not."""
    num_tokens, num_heads, dim = fused.shape
    dtype, device = fused.dtype, str(fused.device)
    query_heads = num_heads - 2 * num_kv_heads
    query, key, value = fused.tensor_split((query_heads, query_heads + num_kv_heads), dim=1)
    inputs = (query, key, value, *angles(num_tokens, pairs, dtype, device))
    norms = (torch.rand(2, dim, device=device).to(dtype) + 0.5).unbind()
    pages, scales = make_pages(12, PAGE_SIZE, key, stored)
    before, fused_before = pages.clone(), fused.clone()
    exact = torch.zeros(pages.shape, dtype=torch.float64)
    options: dict[str, Any] = {"eps": EPS, "interleaved": interleaved}
    exact_options = dict(options)
    if has_norms:
        options["norms"] = norms
        exact_options["norms"] = [norm.double().cpu() for norm in norms]

    with poisoned_memory():
        rotated = rotate_and_store(
            *inputs, pages, slots, scales=scales, static_scales=static_scales, **options
        )

    exact_inputs = [*(each.double().cpu() for each in inputs), exact, slots.cpu()]
    expected = rotate_and_store_reference(*exact_inputs, **exact_options)
    tolerance = TOLERANCES[dtype]
    assert rotated.is_contiguous()
    torch.testing.assert_close(rotated.double().cpu(), expected, rtol=0, atol=tolerance)
    read = pages.double() if scales is None else pages.double() * scales[..., None]
    is_written = torch.zeros(12 * PAGE_SIZE, dtype=torch.bool)
    is_written[slots.cpu()] = True
    if static_scales is not None and scales is not None:
        assert (scales.flatten(1, 2)[:, slots] == static_scales[:, None]).all()
    torch.testing.assert_close(
        read.cpu().flatten(1, 2)[:, is_written],
        exact.flatten(1, 2)[:, is_written],
        rtol=0,
        atol=tolerance + STEPS.get(stored, 0.0),
    )
    others = (each.flatten(1, 2)[:, ~is_written.to(device)] for each in (pages, before))
    assert torch.equal(*(as_bytes(each) for each in others))
    assert torch.equal(fused, fused_before)


def bounded(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return normal numbers, of which no head has so few that its norm makes them large."""
    return torch.randn(shape, device=device).clamp_(-3, 3).to(dtype)


@interpreted_only
@settings(max_examples=40)
@given(
    slots=st.lists(st.integers(0, 47), max_size=4, unique=True),
    num_heads=st.integers(1, 10),
    num_kv_heads=st.integers(1, 3),
    pairs=st.integers(4, 36),
    rest=st.integers(0, 20),
    has_norms=st.booleans(),
    interleaved=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
    quantised=st.sampled_from([None, *GREATEST]),
)
def test_heads_of_any_shape_agree_with_torch(
    slots: list[int],
    num_heads: int,
    num_kv_heads: int,
    rest: int,
    dtype: torch.dtype,
    quantised: torch.dtype | None,
    **options: Any,
) -> None:
    torch.manual_seed(options["pairs"])
    shape = len(slots), num_heads + 2 * num_kv_heads, 2 * options["pairs"] + rest
    fused, at = bounded(*shape, dtype=dtype, device="cpu"), torch.tensor(slots, dtype=torch.int64)

    check(fused, num_kv_heads, at, quantised or dtype, **options)


@pytest.mark.parametrize("quantised", GREATEST, ids=str)
def test_static_scales_are_those_of_heads(device: str, quantised: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([[8.0, 7.0, 6.0], [5.0, 8.0, 7.5]], device=device)
    check(
        bounded(2, 15, 64, dtype=torch.bfloat16, device=device),
        3,
        torch.tensor([45, 3], device=device),
        quantised,
        pairs=32,
        has_norms=False,
        static_scales=(sizes / GREATEST[quantised]).to(SCALE_DTYPE),
    )


HEADS = ((32, 8, 128, False), (16, 8, 128, True), (9, 3, 64, False), (4, 1, 80, True))
QUANTISED = (None, *GREATEST)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "has_norms", "quantised", "dtype"),
    thinned([(*heads, *kinds) for heads, *kinds in product(HEADS, QUANTISED, TOLERANCES)], 5),
    ids=str,
)
def test_projections_of_models_agree_with_torch(
    device: str,
    dtype: torch.dtype,
    quantised: torch.dtype | None,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    has_norms: bool,
) -> None:
    torch.manual_seed(0)
    check(
        bounded(2, num_heads + 2 * num_kv_heads, dim, dtype=dtype, device=device),
        num_kv_heads,
        torch.tensor([45, 3], device=device),
        quantised or dtype,
        pairs=dim // 2,
        has_norms=has_norms,
    )
