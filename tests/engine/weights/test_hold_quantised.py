"""Layers hold the numbers of a quantised checkpoint, in formats that kernels multiply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remora.engine.layers.linear import Linear
from remora.engine.layers.mlp import MLP
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.parallel.layout import WHOLE, Layout
from remora.engine.weights.hold_quantised import describe_quantised
from remora.kernels.lora import RowGroups
from remora.kernels.quantised.quant_formats import tensors_of
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load_f32
from tests.engine.weights.formats.checkpoints import quantise
from tests.engine.weights.formats.writers import BLOCKS, SAMPLES, gptq

CPU = torch.device("cpu")
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HELD = {
    "awq": "int4",
    "awq-g64-short": "int4",
    "gptq-v1": "int4",
    "gptq-act-order": "int4",
    "gptq-2-bits": "int4",
    "ct-packed-asymmetric": "int4",
    "gptq-8-bits": "int8 in groups",
    "ct-packed-8-bits": "int8 in groups",
    "ct-int8": "int8",
    "bnb-int8": "int8",
    "ct-float8": "fp8",
    "fp8-tensor": "fp8",
    "ct-mxfp4": "mxfp4",
    "ct-nvfp4": "nvfp4",
    "modelopt-nvfp4": "nvfp4",
}


@pytest.fixture
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    torch.manual_seed(0)
    return tiny_checkpoints("llama", **SIZES)


def held(linear: Linear) -> Tensor:
    return torch.cat([part.dequantised() for part in linear.quantised])


def load_linears(path: Path) -> list[tuple[str, Linear]]:
    return [each for each in load_f32(path).linears() if each[0]]  # those of layers


def check(model: DecoderModel, plain: DecoderModel) -> None:
    """Compare each number of quantised layers with the dequantised checkpoint's."""
    for (_, linear), (_, same) in zip(model.linears(), plain.linears(), strict=True):
        if linear.quantised:
            assert torch.equal(held(linear), same.weight)
            assert "weight" not in vars(linear)  # not allocated
        else:
            assert torch.equal(linear.weight, same.weight)


@pytest.mark.parametrize("name", HELD)
def test_layers_hold_the_numbers_of_the_checkpoint(name: str, llama: Path, tmp_path: Path) -> None:
    quantised, plain = quantise(llama, tmp_path, SAMPLES[name], LINEARS)

    model = load_f32(quantised, held="stored")

    check(model, load_f32(plain))
    counts = describe_quantised(model).split(", ")
    assert counts[0].split(" ", 1)[1] == HELD[name]
    assert model.dequantised == frozenset()
    assert not any("proj.weight" in tensor for tensor in model.tensors())
    facts = read_model_facts(quantised)
    numbers = sum(linear.weight.numel() for _, linear in load_linears(plain))
    assert sum(each.device_layers for each in facts.stored) == numbers


@pytest.mark.parametrize("name", ["fp8-blocks", "bnb-nf4"])
def test_what_no_format_holds_is_dequantised(name: str, llama: Path, tmp_path: Path) -> None:
    quantised, plain = quantise(llama, tmp_path, SAMPLES[name], LINEARS)

    model = load_f32(quantised, held="stored")

    check(model, load_f32(plain))
    assert describe_quantised(model) == "7 dequantised"


def test_blocks_of_fused_parts_are_joined_at_boundaries(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """128 outputs of queries are joined with 64 of keys; then 64 of values are apart."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4}
    path = tiny_checkpoints("llama", num_hidden_layers=1, head_dim=32, **sizes)
    quantised, plain = quantise(path, tmp_path, BLOCKS, LINEARS)

    model = load_f32(quantised, held="stored")

    check(model, load_f32(plain))
    qkv = model.blocks[0].attention.linears()[0]
    assert [len(part.values) for part in qkv.quantised] == [192, 64]


def test_a_layer_with_an_unquantised_part_is_dequantised(llama: Path, tmp_path: Path) -> None:
    quantised, plain = quantise(llama, tmp_path, SAMPLES["awq"])

    model = load_f32(quantised, held="stored")

    check(model, load_f32(plain))
    assert describe_quantised(model) == "2 int4, 2 dequantised"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*HELD, "gptq-of-128"])
def test_a_rank_holds_its_outputs_and_inputs(
    rank: int, name: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    """Whose boundary lies within groups: 128 inputs of 192 make groups of 32 at 96."""
    path = tiny_checkpoints("llama", **{**SIZES, "hidden_size": 192, "num_attention_heads": 4})
    of_128 = replace(
        SAMPLES["gptq-v1"],
        settings={"quant_method": "gptq", "bits": 4, "group_size": 128},
        write=lambda o, i: gptq(o, i, size=128),
    )
    quantised, plain = quantise(path, tmp_path, SAMPLES.get(name, of_128), LINEARS)
    layout = Layout(rank=rank, tp_size=2)

    model = load_f32(quantised, held="stored", layout=layout)

    check(model, load_f32(plain, layout=layout))
    assert any(linear.quantised for _, linear in model.linears())
    if name != "gptq-act-order":
        assert model.dequantised == frozenset()


EXPERTS = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize("layout", [WHOLE, Layout(rank=1, tp_size=2)])
def test_experts_of_blocks_are_stacked(
    layout: Layout, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("mixtral", **EXPERTS)
    quantised, plain = quantise(path, tmp_path, BLOCKS, (".w1", ".w2", ".w3", "o_proj"))

    model = load_f32(quantised, held="stored", layout=layout)

    exact = load_f32(plain, layout=layout)
    check(model, exact)
    ((_, experts),), ((_, same),) = model.experts(), exact.experts()
    assert experts.quantised is not None
    gate_up, down = experts.quantised
    assert torch.equal(gate_up.dequantised(), same.gate_up)
    assert torch.equal(down.dequantised(), same.down)
    assert not {"gate_up", "down"} & vars(experts).keys()
    assert model.dequantised == frozenset()
    assert describe_quantised(model).endswith("1 layers of experts in fp8 in blocks")


@pytest.mark.parametrize("layout", [WHOLE, Layout(rank=1, tp_size=2)])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("awq", "int4"),
        ("ct-packed-8-bits", "int8 in groups"),
        ("ct-int8", "int8 in groups"),
        ("ct-mxfp4", "mxfp4"),
        ("modelopt-nvfp4", "nvfp4"),
    ],
)
def test_experts_in_groups_are_stacked(
    name: str, shown: str, layout: Layout, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("mixtral", **{**EXPERTS, "intermediate_size": 192})
    quantised, plain = quantise(path, tmp_path, SAMPLES[name], (".w1", ".w2", ".w3"))

    model = load_f32(quantised, held="stored", layout=layout)

    exact = load_f32(plain, layout=layout)
    ((_, experts),), ((_, same),) = model.experts(), exact.experts()
    assert experts.quantised is not None
    gate_up, down = experts.quantised
    assert torch.equal(gate_up.dequantised(), same.gate_up)
    assert torch.equal(down.dequantised(), same.down)
    assert experts.num_bytes == sum(
        tensor.nbytes for each in experts.quantised for tensor in tensors_of(each).values()
    )
    assert describe_quantised(model) == f"1 layers of experts in {shown}"
    numbers = sum(each.device_layers for each in read_model_facts(quantised).stored)
    assert numbers == layout.tp_size * (same.gate_up.numel() + same.down.numel())


def test_experts_whose_inputs_are_ordered_are_dequantised(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("mixtral", **{**EXPERTS, "intermediate_size": 192})
    quantised, plain = quantise(path, tmp_path, SAMPLES["gptq-act-order"], (".w1", ".w2", ".w3"))

    model = load_f32(quantised, held="stored")

    ((_, experts),), ((_, same),) = model.experts(), load_f32(plain).experts()
    assert experts.quantised is None
    assert torch.equal(experts.gate_up, same.gate_up)


def test_experts_whose_blocks_are_cut_are_dequantised(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("mixtral", **{**EXPERTS, "intermediate_size": 384})
    quantised, plain = quantise(path, tmp_path, BLOCKS, (".w1", ".w2", ".w3"))
    layout = Layout(rank=1, tp_size=2)

    model = load_f32(quantised, held="stored", layout=layout)

    ((_, experts),), ((_, same),) = model.experts(), load_f32(plain, layout=layout).experts()
    assert torch.equal(experts.gate_up, same.gate_up)
    assert torch.equal(experts.down, same.down)


def test_experts_are_rounded_to_blocks_on_loading(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("mixtral", **EXPERTS)

    model, plain = load_f32(path, held="fp8"), load_f32(path)

    ((_, experts),), ((_, same),) = model.experts(), plain.experts()
    assert experts.quantised is not None
    for held_as, exact in zip(experts.quantised, (same.gate_up, same.down), strict=True):
        error = (held_as.dequantised() - exact).abs()
        assert (error <= exact.abs() * 2**-4 + held_as.scales.max() * 2**-10).all()
        assert error.max() > 0


def test_experts_are_rounded_to_integers_on_loading(tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("mixtral", **EXPERTS)

    model, plain = load_f32(path, held="int8"), load_f32(path)

    ((_, experts),), ((_, same),) = model.experts(), plain.experts()
    assert experts.quantised is not None
    for held_as, exact in zip(experts.quantised, (same.gate_up, same.down), strict=True):
        error = (held_as.dequantised() - exact).abs()
        assert (error <= exact.abs().amax(2, keepdim=True) / 127 * 0.51).all()
        assert error.max() > 0
    assert "1 layers of experts in int8 in groups" in describe_quantised(model)


@pytest.mark.parametrize("rounding", ["fp8", "int8"])
@pytest.mark.parametrize("layout", [WHOLE, Layout(rank=1, tp_size=2)])
def test_weights_of_layers_are_rounded_on_loading(
    rounding: str, layout: Layout, llama: Path
) -> None:
    model, plain = load_f32(llama, held=rounding, layout=layout), load_f32(llama, layout=layout)

    assert describe_quantised(model) == f"4 {rounding}"
    step = 2**-4 if rounding == "fp8" else 1 / 254
    for (_, linear), (_, same) in zip(model.linears(), plain.linears(), strict=True):
        if linear.quantised:
            error = (held(linear) - same.weight).abs()
            size = same.weight.abs() if rounding == "fp8" else linear.quantised[0].scales[:, None]
            assert (error <= size * (step if rounding == "fp8" else 0.51) + 1e-3).all()
            assert error.max() > 0
    assert torch.equal(model.head.linear.weight, plain.head.linear.weight)


def test_weights_that_are_quantised_already_are_not_rounded(llama: Path, tmp_path: Path) -> None:
    quantised, plain = quantise(llama, tmp_path, SAMPLES["awq"], ("o_proj", "down_proj"))

    model, exact = load_f32(quantised, held="int8"), load_f32(plain)

    assert describe_quantised(model) == "2 int8, 2 int4"
    for (_, linear), (_, same) in zip(model.linears(), exact.linears(), strict=True):
        if "o_proj" in linear.parts:
            assert torch.equal(held(linear), same.weight)


def test_adapters_are_added_to_quantised_products(llama: Path, tmp_path: Path) -> None:
    quantised, plain = quantise(llama, tmp_path, SAMPLES["awq"], LINEARS)
    rows, groups = torch.randn(3, 192), RowGroups.of(np.array([0, 1, 0], np.int32), CPU)
    update = torch.randn(2, 192), torch.randn(96, 2)

    def project(path: Path, held: str) -> Tensor:
        mlp = load_f32(path, held=held).blocks[0].mlp
        assert isinstance(mlp, MLP)
        mlp.down_proj.allocate_slots(1, 2).write(0, 0, *update)
        return mlp.down_proj(rows, groups)

    made, exact = project(quantised, "stored"), project(plain, "dequantised")

    assert torch.allclose(made, exact, atol=1e-3)
    assert (made[1] - load_linears(plain)[-1][1](rows)[1]).abs().max() > 0.1
