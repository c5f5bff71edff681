"""Float32 logits of head and routers from 16-bit factors, with a stand-in for CUDA's product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import remora.kernels.linear as products
from remora.engine.layers import experts as layers
from remora.engine.models.decoder import DecoderModel
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.models.logits import make_ids
from tests.engine.models.paged_model import PagedModel


@pytest.fixture
def model(tiny_checkpoints: TinyCheckpoints) -> DecoderModel:
    """A model whose routers hold numbers of bfloat16."""
    model = load(tiny_checkpoints("olmoe"), torch.bfloat16)
    for _, experts in model.experts():
        experts.router.weight.copy_(experts.router.weight.bfloat16())
    return model


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let products have float32 results; return the outputs of each."""
    found: list[int] = []

    def mm(x: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert x.dtype == right.dtype == torch.bfloat16
        assert out_dtype == torch.float32
        found.append(right.shape[1])
        return x.float() @ right.float()

    monkeypatch.setattr(torch, "mm", mm)
    for module in (products, layers):
        monkeypatch.setattr(module, "writes_float32", lambda device, dtype: dtype.itemsize == 2)
    return found


def logits_of(model: DecoderModel) -> Tensor:
    return PagedModel(model).step(a=make_ids(9))["a"]


def test_logits_of_routers_and_head_are_not_rounded(
    model: DecoderModel, request: pytest.FixtureRequest
) -> None:
    rounded = logits_of(model)

    widths = request.getfixturevalue("widths")
    model.narrow_routers()
    logits = logits_of(model)

    numbers = [experts.config.num_experts for _, experts in model.experts()]
    assert len(numbers) > 1
    assert widths == [*numbers, model.vocab_size]
    assert rounded.dtype == logits.dtype == torch.float32
    tolerance = 2**-7 * float(rounded.abs().max())
    torch.testing.assert_close(logits, rounded, atol=tolerance, rtol=0)
    assert not torch.equal(logits, rounded)


@pytest.mark.usefixtures("widths")
def test_a_router_of_more_bits_stays_as_it_is(model: DecoderModel) -> None:
    first, *others = [experts for _, experts in model.experts()]
    first.router.weight[0, 0] = 1 + 2**-12

    model.narrow_routers()

    assert first.router.weight.dtype == torch.float32
    assert {experts.router.weight.dtype for experts in others} == {torch.bfloat16}


def test_a_cpu_has_float32_routers(model: DecoderModel) -> None:
    expected = logits_of(model)

    model.narrow_routers()

    assert {experts.router.weight.dtype for _, experts in model.experts()} == {torch.float32}
    assert torch.equal(logits_of(model), expected)
