"""Checkpoints of every format are what their dequantised copies are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.planning.loading import PLAIN_LOADING
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import check_files, open_weights
from remora.engine.parallel.layout import Layout
from remora.engine.weights.formats.bits import add_to_each, unpack_bits, unpack_spread
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load
from tests.engine.weights.formats.checkpoints import quantise, rewrite
from tests.engine.weights.formats.writers import SAMPLES, Sample, ct_packed, signed, stream

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1}


def read(path: Path) -> dict[str, Tensor]:
    source = open_weights(path, "auto")
    return {name: tensor.clone() for name, tensor in source.read(source.shapes())}


@pytest.fixture
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    torch.manual_seed(0)
    return tiny_checkpoints("llama", **SIZES)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", SAMPLES)
def test_weights_are_the_numbers_that_the_format_defines(
    name: str, llama: Path, tmp_path: Path
) -> None:
    quantised, plain = quantise(llama, tmp_path, SAMPLES[name])

    assert_same(read(quantised), read(plain))


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "ct-int8", "fp8-blocks"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_its_shard_of_the_dequantised_weights(
    rank: int, name: str, llama: Path, tmp_path: Path
) -> None:
    layout = Layout(rank=rank, tp_size=2)
    quantised, plain = (
        load(path, torch.bfloat16, layout=layout).tensors()
        for path in quantise(llama, tmp_path, SAMPLES[name])
    )

    for tensor, shard in plain.items():
        assert torch.equal(quantised[tensor].memory, shard.memory)


@pytest.mark.parametrize(
    ("family", "endings"),
    [
        ("mixtral", (".w1", ".w2", ".w3")),
        ("deepseek-v3", ("kv_b_proj", "o_proj", "shared_experts.up_proj")),
        ("llama", ("embed_tokens", "lm_head")),
    ],
)
def test_experts_latents_embeddings_and_heads_are_read(
    family: str, endings: tuple[str, ...], tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints(family, num_hidden_layers=2)
    sample = Sample({"quant_method": "bitsandbytes"}, SAMPLES["bnb-int8"].write)

    quantised, plain = quantise(path, tmp_path, sample, endings)

    assert len(read(plain)) < len(load_file(quantised / "model.safetensors"))
    assert_same(read(quantised), read(plain))


@pytest.mark.observes("model.checkpoint_formats", "sglang:--quantization")
def test_a_checkpoint_in_another_format_than_the_configuration_says_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    awq, _ = quantise(llama, tmp_path, SAMPLES["awq"])
    allowed = replace(PLAIN_LOADING, formats=("gptq", "awq"))
    other = replace(PLAIN_LOADING, formats=("gptq", "compressed-tensors"))

    assert read_model_facts(awq, allowed).stored
    for path, found in ((awq, "awq"), (llama, "weights that are not quantised")):
        with pytest.raises(ConfigError, match=rf"has {found}, .* says gptq or compressed-tensors"):
            read_model_facts(path, other)


def test_settings_may_be_in_a_file_of_their_own(llama: Path, tmp_path: Path) -> None:
    sample = SAMPLES["awq"]
    quantised, plain = quantise(llama, tmp_path, Sample({}, sample.write))
    settings = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (quantised / "quant_config.json").write_text(json.dumps(settings))

    assert_same(read(quantised), read(plain))


def test_quantised_checkpoints_that_say_float16_are_computed_in_bfloat16(
    llama: Path, tmp_path: Path
) -> None:
    for path in quantise(llama, tmp_path, SAMPLES["awq"]):
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**raw, "dtype": "float16"}))

    assert read_model_facts(tmp_path / "quantised").dtype == "bfloat16"
    assert read_model_facts(tmp_path / "plain").dtype == "float16"


def test_a_description_counts_the_weights_of_each_kind(llama: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES["gptq-v1"])

    found = check_files(quantised, "auto", PLAIN_LOADING)

    assert found.endswith("quantised: 4 gptq 4 bits, groups of 32")


@pytest.mark.parametrize(("name", "bits"), [("ct-nvfp4", 4.5), ("modelopt-nvfp4", 4.5)])
def test_scales_of_4_bit_floats_count_as_the_bytes_that_they_are_stored_in(
    name: str, bits: float, llama: Path, tmp_path: Path
) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES[name])

    assert {each.bits for each in read_model_facts(quantised).stored} == {bits}


def test_runs_that_cross_rows_are_counted_apart(llama: Path, tmp_path: Path) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES["bnb-nf4"])

    found = {each.label: each for each in read_model_facts(quantised).stored}

    whole = found.pop("bitsandbytes nf4, runs of 64")
    crossing = found.pop("bitsandbytes nf4, runs of 64 that cross rows")
    assert not found
    assert (whole.number, whole.is_native) == (1, True)
    assert (crossing.number, crossing.is_native) == (3, False)


DAMAGES: Mapping[str, tuple[str, str, str]] = {
    "no-scales": ("awq", "scales", r"has qweight and no scales"),
    "no-zeros": ("gptq-v1", "qzeros", r"has qweight and no qzeros"),
    "no-packed-scale": ("ct-packed", "weight_scale", r"has weight_packed and no weight_scale"),
    "no-table": ("bnb-nf4", "weight.quant_map", r"has quant_state and no quant_map"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_missing_tensors_are_named(damage: str, llama: Path, tmp_path: Path) -> None:
    name, ending, message = DAMAGES[damage]
    quantised, _ = quantise(llama, tmp_path, SAMPLES[name])
    stored = load_file(quantised / "model.safetensors")
    del stored[f"model.layers.0.mlp.down_proj.{ending}"]
    save_file(stored, quantised / "model.safetensors")

    with pytest.raises(ConfigError, match=rf"down_proj.*{message}"):
        load(quantised)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("awq", "scales"),
        ("awq", "qzeros"),
        ("awq-gemv", "scales"),
        ("gptq-v1", "scales"),
        ("gptq-v1", "g_idx"),
        ("ct-packed", "weight_packed"),
        ("ct-packed", "weight_scale"),
        ("ct-packed-g64-short", "weight_scale"),
        ("ct-packed-asymmetric", "weight_zero_point"),
        ("ct-bytes-g64-short", "weight_zero_point"),
        ("ct-int8", "weight_scale"),
        ("ct-nvfp4", "weight_scale"),
        ("fp8-blocks", "weight_scale_inv"),
        ("fbgemm", "weight_scale"),
        ("modelopt-nvfp4", "weight_scale"),
        ("bnb-nf4", "weight"),
        ("bnb-nf4", "weight.absmax"),
        ("bnb-nf4", "weight.quant_map"),
        ("bnb-nf4-nested", "weight.nested_absmax"),
        ("bnb-nf4-nested", "weight.nested_quant_map"),
        ("bnb-int8", "SCB"),
        ("torchao-int8", "_weight_scale"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    name: str, ending: str, llama: Path, tmp_path: Path
) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES[name])
    stored = load_file(quantised / "model.safetensors")
    tensor = f"model.layers.0.mlp.down_proj.{ending}"
    stored[tensor] = stored[tensor][:-1].contiguous()
    save_file(stored, quantised / "model.safetensors")

    with pytest.raises(ConfigError, match=r"down_proj.*(expected|do not)"):
        load(quantised)


@pytest.mark.parametrize(
    ("name", "ending"), [("awq", "scales"), ("fp8-blocks", "weight_scale_inv"), ("bnb-int8", "SCB")]
)
def test_scales_that_are_no_numbers_are_refused(
    name: str, ending: str, llama: Path, tmp_path: Path
) -> None:
    quantised, _ = quantise(llama, tmp_path, SAMPLES[name])
    stored = load_file(quantised / "model.safetensors")
    stored[f"model.layers.0.mlp.down_proj.{ending}"].flatten()[0] = float("nan")
    save_file(stored, quantised / "model.safetensors")

    with pytest.raises(
        ConfigError, match=r"down_proj.weight .* a scale is infinite or not a number"
    ):
        load(quantised)


@pytest.mark.parametrize(("size", "groups"), [(32, 3), (128, 1)])
def test_groups_of_another_size_than_the_settings_say_are_named(
    size: int, groups: int, llama: Path, tmp_path: Path
) -> None:
    settings = SAMPLES["ct-packed-g64-short"].settings
    sample = Sample(settings, lambda o, i: ct_packed(o, i, size=size))
    quantised, _ = quantise(llama, tmp_path, sample, ("self_attn.q_proj",))
    message = (
        rf"q_proj\.weight_scale .* is \[96, {groups}\]; expected \[96, 2\] for groups of 64 of"
    )
    with pytest.raises(ConfigError, match=message):
        load(quantised)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "quantization_config of hqq, which is not read"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "awq version gemv_fast is not read"),
        ({"quant_method": "awq", "bits": 8}, "awq with bits 8"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 5}, "gptq with bits 5"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"},
            "packing_format auto_round:gptqmodel",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"R1": {}}},
            "transform_config, which rotates",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo W4A16_AWQ"),
        ({"quant_method": "awq"}, "holds no tensors of that format"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    settings: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    path = rewrite(llama, tmp_path / "other", settings, load_file(llama / "model.safetensors"))

    with pytest.raises(ConfigError, match=message):
        load(path)


def test_a_list_that_disagrees_with_the_tensors_is_an_error(llama: Path, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.down_proj"
    sample = SAMPLES["fp8-blocks"]
    settings = {**sample.settings, "modules_to_not_convert": [module]}
    quantised, _ = quantise(llama, tmp_path, Sample(settings, sample.write))

    with pytest.raises(ConfigError, match=rf"{module} .* is quantised .* lists '{module}'"):
        load(quantised)


def test_transposed_weights_are_not_mistaken(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
    config = {**sizes, "architectures": ["GPT2LMHeadModel"]}
    sample = SAMPLES["bnb-int8"]
    config["quantization_config"] = sample.settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    parts, _ = sample.write(32, 32)
    module = "transformer.h.0.attn.c_proj"
    save_file({f"{module}.{k}": v for k, v in parts.items()}, tmp_path / "model.safetensors")

    with pytest.raises(ConfigError, match="GPT2LMHeadModel stores transposed weights"):
        open_weights(tmp_path, "auto")


@given(
    st.integers(1, 8).flatmap(
        lambda bits: st.tuples(
            st.just(bits), st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=70)
        )
    )
)
def test_a_stream_of_bits_is_unpacked(case: tuple[int, list[int]]) -> None:
    bits, listed = case

    words = torch.tensor([stream(listed, bits)], dtype=torch.int32)

    assert unpack_bits(words, bits, len(listed)).tolist() == [listed]


@given(
    st.integers(1, 8).flatmap(
        lambda bits: st.tuples(
            st.just(bits), st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=70)
        )
    )
)
def test_words_of_whole_numbers_are_unpacked(case: tuple[int, list[int]]) -> None:
    bits, listed = case
    each = 32 // bits
    parts = [listed[at : at + each] for at in range(0, len(listed), each)]

    words = torch.tensor([[stream(part, bits)[0] for part in parts]], dtype=torch.int32)

    assert unpack_spread(words, bits, len(listed)).tolist() == [listed]


@given(st.sampled_from([2, 4, 8]), st.integers(0, 2**32 - 1))
def test_one_is_added_as_a_sum_of_whole_words(bits: int, word: int) -> None:
    ones = int(("0" * (bits - 1) + "1") * (32 // bits), 2)

    found = add_to_each(torch.tensor([signed(word)], dtype=torch.int32), bits)

    assert found.item() == signed((word + ones) % 2**32)
