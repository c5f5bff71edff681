"""Shares of ranks: together they are the checkpoint, and nobody loads more than a plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.load import parse_args
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan, make_plan
from remora.engine.models.checkpoint import read_config
from remora.engine.models.config import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    HeadConfig,
    HeadNorm,
    LayerConfig,
    MLPConfig,
    NormConfig,
)
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.rope_config import RopeConfig
from remora.engine.parallel.layout import Layout
from remora.engine.weights.gguf.weights import GGUFWeights
from remora.engine.weights.safetensors import SafetensorsWeights
from tests.conftest import TinyCheckpoints
from tests.engine.configured import MACHINE as SMALL_MACHINE
from tests.engine.loaded import load_f32
from tests.engine.weights.gguf.tiny_gguf import make_gguf

MACHINE = replace(SMALL_MACHINE, total_bytes=2**50, available_bytes=2**50)
TARGETS = (
    *(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")),
    *("embed_tokens", "lm_head"),
)


def layouts(tp_size: int, pp_size: int) -> list[Layout]:
    return [
        Layout(rank=rank, tp_size=tp_size, pp_size=pp_size) for rank in range(tp_size * pp_size)
    ]


def load(path: Path, layout: Layout, load_format: str = "auto") -> DecoderModel:
    return load_f32(path, load_format=load_format, layout=layout)


@st.composite
def models(draw: st.DrawFn) -> tuple[DecoderConfig, int, int]:
    """Draw a model, and numbers of ranks and stages that divide it."""
    tp_size, kv_heads = draw(
        st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 3), (3, 6), (4, 2), (4, 4), (4, 8), (6, 2)])
    )
    groups = draw(st.integers(1, 3)) * max(1, tp_size // kv_heads)
    num_layers = draw(st.integers(1, 5))
    norm = NormConfig(eps=1e-5)
    attention = AttentionConfig(
        num_heads=kv_heads * groups,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        scale=1.0,
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        head_norm=HeadNorm(norm=norm) if draw(st.booleans()) else None,
    )
    mlp = MLPConfig(
        size=draw(st.integers(tp_size, 41)),
        bias=draw(st.booleans()),
        gated=draw(st.booleans()),
    )
    config = DecoderConfig(
        architecture="Any",
        vocab_size=draw(st.integers(tp_size, 67)),
        hidden_size=draw(st.integers(4, 20)),
        max_position=64,
        attention=attention,
        layers=(LayerConfig(rope=RopeConfig(), mlp=mlp),) * num_layers,
        block=BlockConfig(norm=norm),
        head=HeadConfig(tied=draw(st.booleans())),
    )
    return config, tp_size, draw(st.integers(1, num_layers))


def count_holders(config: DecoderConfig, tp_size: int, pp_size: int) -> dict[str, Tensor]:
    """Count for each element of each tensor how many ranks hold it."""
    whole = DecoderModel(config, dtype=torch.float32, device="meta").tensors()
    holders = {name: torch.zeros(shard.shape) for name, shard in whole.items()}
    for layout in layouts(tp_size, pp_size):
        model = DecoderModel(config, dtype=torch.float32, device="cpu", layout=layout)
        for name, shard in model.tensors().items():
            assert shard.memory.shape == holders[name][shard.index].shape
            holders[name][shard.index] += 1
    return holders


@given(models())
def test_every_element_is_held_once_unless_all_need_it(
    drawn: tuple[DecoderConfig, int, int],
) -> None:
    config, tp_size, pp_size = drawn

    for name, holders in count_holders(config, tp_size, pp_size).items():
        if name == "model.norm.weight":
            expected = tp_size * pp_size
        elif "norm" in name:
            expected = tp_size
        elif "k_proj" in name or "v_proj" in name:
            expected = max(1, tp_size // config.num_kv_heads)
        elif name == "model.embed_tokens.weight" and config.head.tied:
            expected = min(pp_size, 2)
        else:
            expected = 1
        assert (holders == expected).all(), name


@given(models())
def test_a_plan_says_what_the_fullest_rank_holds(drawn: tuple[DecoderConfig, int, int]) -> None:
    config, tp_size, pp_size = drawn
    shares = make_shares(config, tp_size, pp_size)
    plan = make_plan_of(config, tp_size, pp_size)

    # A rank that is alone packs a tied head apart; several, whose products are torch's, do not.
    fullest = max(
        count_bytes(share)
        + (share.embedding.weight.nbytes if share.head.tied and len(shares) == 1 else 0)
        for share in shares
    )
    # Biases and norms of such small models are many, beside what is divided.
    norms_and_biases = 4 * (8 * config.hidden_size + 8 * config.head_dim * config.num_heads)
    assert fullest <= plan.weight_bytes + config.num_layers * norms_and_biases
    kv_heads = max(len(share.layout.kv_heads(config.num_kv_heads)) for share in shares)
    layers = max(len(share.layers) for share in shares)
    assert plan.kv_bytes == (4 + 1) * 16 * 2 * 4 * layers * kv_heads * config.head_dim


@given(models(), st.lists(st.sampled_from(TARGETS), unique=True), st.integers(1, 9))
def test_a_plan_says_how_much_room_for_adapters_a_rank_has_at_most(
    drawn: tuple[DecoderConfig, int, int], targets: list[str], max_rank: int
) -> None:
    config, tp_size, pp_size = drawn
    room = LoRASlotConfig(num_slots=3, max_rank=max_rank, targets=tuple(targets))

    plan = make_plan_of(config, tp_size, pp_size, room)

    taken = []
    for share in make_shares(config, tp_size, pp_size):
        slots = {id(place.slots): place.slots for place in share.allocate_slots(room).values()}
        taken.append(sum(each.num_bytes for each in slots.values()))
    assert max(taken) <= plan.adapter_bytes
    if tp_size * pp_size == 1:
        assert taken == [plan.adapter_bytes]


def make_shares(config: DecoderConfig, tp_size: int, pp_size: int) -> list[DecoderModel]:
    return [
        DecoderModel(config, dtype=torch.float32, device="meta", layout=layout)
        for layout in layouts(tp_size, pp_size)
    ]


def make_plan_of(
    config: DecoderConfig, tp_size: int, pp_size: int, adapters: LoRASlotConfig | None = None
) -> EnginePlan:
    whole = DecoderModel(config, dtype=torch.float32, device="meta")
    facts = ModelFacts(
        architecture="Any",
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position=64,
        dtype="float32",
        num_parameters=count_bytes(whole) // 4,
        tied_embeddings=config.head.tied,
        gated=isinstance(config.layers[0].mlp, MLPConfig) and config.layers[0].mlp.gated,
    )
    parallel = {"tp_size": tp_size, "pp_size": pp_size}
    sections = {"model": {"path": "x"}, "engine": {"kv_tokens": 64}, "parallel": parallel}

    return make_plan(parse_args(sections), facts, MACHINE, Path("x"), adapters)


def count_bytes(model: DecoderModel) -> int:
    return sum(shard.memory.nbytes for shard in model.tensors().values())


@pytest.mark.parametrize(("tp_size", "pp_size"), [(3, 1), (1, 3), (3, 2)])
def test_the_plan_of_a_real_model_is_within_a_percent_of_what_is_held(
    tp_size: int, pp_size: int, smollm2_path: Path
) -> None:
    facts, config = read_model_facts(smollm2_path), read_config(smollm2_path)
    parallel = {"tp_size": tp_size, "pp_size": pp_size}
    args = {"model": {"path": str(smollm2_path)}, "parallel": parallel}

    plan = make_plan(parse_args(args), facts, MACHINE, smollm2_path)

    shares = [
        DecoderModel(config, dtype=torch.bfloat16, device="meta", layout=layout)
        for layout in layouts(tp_size, pp_size)
    ]
    fullest = max(
        count_bytes(share) + (share.embedding.weight.nbytes if share.head.tied else 0)
        for share in shares
    )
    assert fullest <= plan.weight_bytes <= 1.01 * fullest


def assert_shares_of(whole: dict[str, Tensor], share: DecoderModel) -> None:
    held = share.tensors()
    assert held
    for name, shard in held.items():
        assert torch.equal(shard.memory, whole[name][shard.index].float()), name


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("load_format", ["safetensors", "gguf", "dummy"])
def test_each_rank_loads_its_part_of_the_same_weights(
    load_format: str,
    tp_size: int,
    pp_size: int,
    tiny_checkpoints: TinyCheckpoints,
    tmp_path: Path,
) -> None:
    path = tiny_checkpoints("llama", dtype=torch.bfloat16)
    whole: dict[str, Tensor]
    match load_format:
        case "gguf":
            path = make_gguf(path, tmp_path / "model.gguf")
            gguf = GGUFWeights(path)
            whole = dict(gguf.read(gguf.shapes().keys()))
        case "safetensors":
            source = SafetensorsWeights(path)
            whole = dict(source.read(source.shapes().keys()))
        case _:
            alone = load(path, Layout(), load_format)
            whole = {name: shard.memory for name, shard in alone.tensors().items()}

    for layout in layouts(tp_size, pp_size):
        assert_shares_of(whole, load(path, layout, load_format))


class Watched:
    """WeightSource that notes what is read of it."""

    read_names: list[str]

    def __init__(self, inner: Any) -> None:
        self.inner, self.label, self.read_names = inner, inner.label, []

    def shapes(self) -> Any:
        return self.inner.shapes()

    def read(self, names: Any) -> Any:
        for name, tensor in self.inner.read(names):
            self.read_names.append(name)
            yield name, tensor


def test_a_stage_reads_none_of_the_other_stages_tensors(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(SafetensorsWeights(tiny_checkpoints("llama")))
    monkeypatch.setattr("remora.engine.models.load.SafetensorsWeights", lambda path, mmap: watched)

    load(tiny_checkpoints("llama"), Layout(rank=1, pp_size=3))

    names = {name for name in watched.read_names if "model.layers.1." not in name}
    assert names == {"model.norm.weight"}
    assert len(watched.read_names) == 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_refuses_weights_that_only_another_rank_would_miss(
    rank: int, tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SafetensorsWeights(tiny_checkpoints("llama"))
    shapes = {name: shape for name, shape in source.shapes().items() if "layers.2.mlp" not in name}
    monkeypatch.setattr(source, "shapes", lambda: shapes)
    monkeypatch.setattr("remora.engine.models.load.SafetensorsWeights", lambda path, mmap: source)

    with pytest.raises(ConfigError, match=r"missing: model\.layers\.2\.mlp\.down_proj"):
        load(tiny_checkpoints("llama"), Layout(rank=rank, pp_size=2))
