import pytest
import torch
from torch import Tensor

import remora.kernels.linear as module
from remora.kernels.linear import (
    can_pack,
    linear,
    linear_reference,
    linear_to_float32,
    pack_weight,
    writes_float32,
)

NEEDS_PACKING = pytest.mark.skipif(not can_pack(), reason="no packed bfloat16 products here")


def test_packing_is_used_where_the_cpu_has_bfloat16_products() -> None:
    weight = torch.randn(48, 32).bfloat16()

    packed = pack_weight(weight)

    assert packed.is_mkldnn == can_pack()
    if torch.cpu._is_avx512_bf16_supported():
        assert can_pack()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 32).to(dtype)

    assert pack_weight(weight) is weight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 300])
def test_a_packed_weight_gives_the_product_of_the_plain_one(num_tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 96).bfloat16(), torch.randn(160, 96).bfloat16()
    offset = torch.randn(160).bfloat16() if bias else None

    product = linear(x, pack_weight(weight), offset)

    # Sums of 96 products in float32, rounded once to 8 bits.
    exact = linear_reference(x.float(), weight.float(), None if offset is None else offset.float())
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.float(), exact, atol=0.01, rtol=0.01)


@NEEDS_PACKING
def test_a_slice_of_rows_can_be_multiplied() -> None:
    x, weight = torch.randn(8, 64).bfloat16(), torch.randn(32, 64).bfloat16()

    product = linear(x[::2, :32], pack_weight(weight[:, :32].contiguous()), None)

    torch.testing.assert_close(product, linear_reference(x[::2, :32], weight[:, :32], None))


def test_only_products_of_16_bits_with_cuda_have_float32_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, halves = torch.device("cuda"), (torch.bfloat16, torch.float16)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert all(writes_float32(gpu, dtype) for dtype in halves)
    assert not writes_float32(gpu, torch.float32)
    assert not any(writes_float32(torch.device("cpu"), dtype) for dtype in halves)

    monkeypatch.setattr(torch.version, "cuda", None)  # as with ROCm
    assert not any(writes_float32(gpu, dtype) for dtype in halves)


@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_not_rounded_where_the_device_writes_float32(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for CUDA's `torch.mm` asserts what it is given."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 96).bfloat16(), torch.randn(160, 96).bfloat16()
    offset = torch.randn(160).bfloat16() if bias else None

    def mm(x: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert x.dtype == right.dtype == torch.bfloat16
        assert right.data_ptr() == weight.data_ptr()
        assert out_dtype == torch.float32
        return x.float() @ right.float()

    monkeypatch.setattr(module, "writes_float32", lambda device, dtype: True)
    monkeypatch.setattr(torch, "mm", mm)
    product = linear_to_float32(x, weight, offset)

    exact = linear_reference(x.float(), weight.float(), None if offset is None else offset.float())
    torch.testing.assert_close(product, exact)


def test_a_cpu_rounds_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 96).bfloat16(), pack_weight(torch.randn(160, 96).bfloat16())

    monkeypatch.setattr(torch, "mm", None)
    product = linear_to_float32(x, weight, None)

    assert product.dtype == torch.bfloat16
    assert torch.equal(product, linear(x, weight, None))
