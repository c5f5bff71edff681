import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.kernels.kv_store import GREATEST, SCALE_DTYPE, quantise, store_kv


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    pages = torch.zeros(2, 4, 8, 2, 16)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    slots = torch.tensor([2 * 8 + 7, 1 * 8 + 0, 3 * 8 + 3])

    store_kv(key, value, pages, slots)

    for index, tokens in enumerate((key, value)):
        assert torch.equal(pages[index, 2, 7], tokens[0])
        assert torch.equal(pages[index, 1, 0], tokens[1])
        assert torch.equal(pages[index, 3, 3], tokens[2])
        assert pages[index].count_nonzero() == tokens.count_nonzero()


def test_what_is_not_a_number_is_stored_as_one() -> None:
    pages = torch.zeros(2, 2, 4, 1, 4, dtype=torch.float16)
    key = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0], dtype=torch.float16)

    store_kv(key.view(1, 1, 4), key.view(1, 1, 4), pages, torch.tensor([5]))

    assert pages.isfinite().all()
    assert pages[0, 1, 1, 0, 3] == 1.0


@settings(max_examples=60)
@given(
    size=st.floats(1e-4, 1e4),
    scale=st.floats(1e-4, 1e4),
    seed=st.integers(0, 1000),
    stored=st.sampled_from(list(GREATEST)),
)
def test_static_scales_round_to_within_half_a_step_and_clip_the_rest(
    size: float, scale: float, seed: int, stored: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = size * torch.randn(5, 3, 16, generator=generator)
    static = torch.tensor([scale, scale / 3, scale * 7]).to(SCALE_DTYPE)

    codes, scales = quantise(heads, stored, static)

    assert torch.equal(scales, static.expand(5, 3))
    quotients = heads.double() / static.double()[:, None]
    clipped = quotients.clamp(-GREATEST[stored], GREATEST[stored])
    bits = {torch.int8: 0, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[stored]
    lowest = {torch.int8: 0, torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}[stored]
    exponent = clipped.abs().frexp().exponent - 1  # of int8, all steps are 1
    step = torch.exp2((exponent.clamp(min=lowest) if bits else 0 * exponent) - bits).double()
    # A quotient in float32 is off by 2^-24 of itself.
    assert ((codes.double() - clipped).abs() <= step / 2 + clipped.abs() * 2.0**-23).all()


@pytest.mark.parametrize("stored", GREATEST, ids=str)
def test_static_scales_lie_in_the_slots(stored: torch.dtype) -> None:
    pages = torch.zeros(2, 2, 4, 3, 8, dtype=stored)
    scales = torch.zeros(2, 2, 4, 3, dtype=SCALE_DTYPE)
    static = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=SCALE_DTYPE)
    key, value = torch.randn(2, 1, 3, 8)

    store_kv(key, value, pages, torch.tensor([6]), scales, static)

    assert torch.equal(scales[:, 1, 2], static)
    for part, heads in enumerate((key, value)):
        codes, _ = quantise(heads, stored, static[part])
        assert torch.equal(pages[part, 1, 2].float(), codes[0].float())
