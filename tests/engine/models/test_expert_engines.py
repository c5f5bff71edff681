"""Whole engines with experts or latents: against transformers, and on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from remora.configs.errors import InvalidAdapter
from remora.configs.load import parse_args
from remora.configs.planning.kv_format import kv_bytes_per_token
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import make_plan
from remora.engine.graphs.coverage import not_covered
from remora.engine.layers.experts import Experts
from remora.engine.llm import LLM
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import open_weights
from remora.engine.parallel.layout import Layout
from remora.engine.types import SamplingParams
from remora.engine.weights.rename_tensors import RenamingRules
from remora.lora.cpu_pool import CpuAdapterPool
from tests.conftest import TinyCheckpoints
from tests.engine.models.oracle import Oracle
from tests.engine.models.test_parity import make_prompts
from tests.engine.parallel.runs import run
from tests.engine.parallel.test_shares import MACHINE
from tests.tiny_experts import EXPERT_FAMILIES

TOLERANCE = 2e-4  # of logits of about 2; what differs is the order of sums
PROMPTS = make_prompts([3, 60, 31])
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_one_rank_and_two_generate_what_transformers_does(
    family: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    """Prompts come in chunks, beside sequences that decode."""
    path = tiny_checkpoints(family)
    requests = {str(number): (prompt, GREEDY) for number, prompt in enumerate(PROMPTS)}

    alone, together = run(path, requests), run(path, requests, tp_size=2)

    oracle = Oracle(path)
    for name, (prompt, _) in requests.items():
        oracle.assert_greedy(prompt, alone.token_ids[name])
    assert alone.margin() > TOLERANCE
    assert together.token_ids == alone.token_ids
    for logits, exact in zip(together.steps, alone.steps, strict=True):
        torch.testing.assert_close(logits, exact, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_native_kernels_know_every_family(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    assert not_covered(read_config(tiny_checkpoints(family))) == []


def test_native_kernels_say_what_they_do_not_know(tiny_checkpoints: TinyCheckpoints) -> None:
    config = read_config(tiny_checkpoints("mixtral"))
    config = replace(config, block=replace(config.block, parallel=True))

    assert not_covered(config) == [
        "experts parallel to attention, or without a norm of their own before them",
    ]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_rounded_at_start_up(
    quantization: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("qwen3-moe")
    options: dict[str, Any] = {"quantization": quantization, "kv_tokens": 1024, "num_threads": 1}
    llm = LLM(str(path), dtype="bfloat16", show_progress=False, **options)

    first, again = (llm.generate(PROMPTS, GREEDY) for _ in range(2))

    assert [len(each.token_ids) for each in first] == [6, 6, 6]
    assert [each.token_ids for each in first] == [each.token_ids for each in again]


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_a_plan_says_what_the_fullest_rank_holds(
    family: str, tp_size: int, pp_size: int, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)
    config, facts = read_config(path), read_model_facts(path)
    parallel = {"tp_size": tp_size, "pp_size": pp_size}
    args = {"model": {"path": str(path), "dtype": "float32"}, "parallel": parallel}

    plan = make_plan(parse_args(args), facts, MACHINE, path)

    shares = [
        DecoderModel(
            config,
            dtype=torch.float32,
            device="meta",
            layout=Layout(rank=rank, tp_size=tp_size, pp_size=pp_size),
        )
        for rank in range(tp_size * pp_size)
    ]
    fullest = max(
        sum(shard.memory.nbytes for shard in share.tensors().values()) for share in shares
    )
    if facts.tied_embeddings and len(shares) == 1:
        fullest += shares[0].embedding.weight.nbytes  # packed, it becomes a copy
    assert 0.98 * fullest <= plan.weight_bytes <= 1.1 * fullest


@pytest.mark.parametrize(("cpu_kernels", "times"), [("auto", 2), ("torch", 1)])
def test_native_kernels_keep_latents_twice(
    cpu_kernels: str, times: int, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints("deepseek-v3")
    args = {"model": {"path": str(path)}, "engine": {"cpu_kernels": cpu_kernels, "kv_tokens": 1024}}

    plan = make_plan(parse_args(args), read_model_facts(path), MACHINE, path)

    once = kv_bytes_per_token(read_model_facts(path), plan.dtype)
    assert plan.kv_bytes == (1024 + plan.page_size) * once * times


def test_latents_are_counted_once_and_on_every_rank(tiny_checkpoints: TinyCheckpoints) -> None:
    facts = read_model_facts(tiny_checkpoints("deepseek-v3"))
    each_layer = 32 + 8  # a latent and a rotated key

    assert kv_bytes_per_token(facts, "bfloat16") == 3 * each_layer * 2
    assert kv_bytes_per_token(facts, "bfloat16", tp_size=2) == 3 * each_layer * 2
    assert kv_bytes_per_token(facts, "bfloat16", pp_size=3) == each_layer * 2


@pytest.mark.parametrize(("num_tokens", "share"), [(1, 1 / 2), (2, 1 / 4), (3, 1 / 8), (64, 0)])
def test_of_experts_those_are_read_that_tokens_go_through(
    num_tokens: int, share: float, tiny_checkpoints: TinyCheckpoints
) -> None:
    config = read_config(tiny_checkpoints("mixtral"))
    model = DecoderModel(config, dtype=torch.bfloat16, device="meta")
    mlp = model.blocks[0].mlp

    assert isinstance(mlp, Experts)
    # A token goes through 2 of 4.
    assert mlp.idle_bytes(num_tokens) == (mlp.gate_up.nbytes + mlp.down.nbytes) * share


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("qwen3-moe", "mlp.experts.3.gate_proj"),
        ("qwen2-moe", "mlp.shared_expert_gate"),
        ("deepseek-v3", "self_attn.kv_b_proj"),
    ],
)
def test_adapters_of_what_has_no_slots_are_refused(
    family: str, module: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints(family)
    base = open_weights(path, "auto")
    shapes = {name.removesuffix(".weight"): shape for name, shape in base.shapes().items()}
    name = next(name for name in shapes if name.endswith(module))
    outputs, inputs = shapes[name]
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [module]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    named = f"base_model.model.{name}.lora_"
    tensors = {
        f"{named}A.weight": torch.zeros(4, inputs),
        f"{named}B.weight": torch.zeros(outputs, 4),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    room = LoRASlotConfig(num_slots=1, max_rank=8, targets=("gate_proj", module.split(".")[-1]))
    config = read_config(path)
    places = DecoderModel(config, dtype=torch.float32, device="cpu").allocate_slots(room)

    pool = CpuAdapterPool(room, {**places}, base, RenamingRules(config.rules))

    with pytest.raises(InvalidAdapter, match="have no slots"):
        pool.prepare(1, tmp_path)
