"""Adapters made with PEFT itself, with random values in every tensor."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from remora.configs.load import parse_args
from remora.engine.launch import build_engine
from remora.engine.protocols import Adapting
from remora.engine.types import Request, SamplingParams
from tests.engine.parallel.teams import ThreadTeam

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Settings that a merged adapter and one in a slot are both tested with.
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank-1": {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj", "down_proj"]},
    "rank-8": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
    "rank-16": {"r": 16, "lora_alpha": 3, "target_modules": ATTENTION, "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": r".*\.self_attn\.(q|o)_proj",
        "rank_pattern": {"layers.0.self_attn.q_proj": 7, r".*\.2\..*o_proj": 2},
        "alpha_pattern": {"o_proj": 32},
    },
    "some-layers": {"r": 4, "target_modules": ["up_proj"], "layers_to_transform": [0, 2]},
}
ENDS = {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}


def make_adapter(base: Path, folder: Path, *, seed: int = 0, **settings: Any) -> PeftModel:
    """Write an adapter of the model in `base`; return the model that has it, in float32.

    settings:  of LoraConfig
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return adapt(model, folder, seed=seed, **settings)


def adapt(model: Any, folder: Path, *, seed: int = 0, **settings: Any) -> PeftModel:
    """Write an adapter of transformers' `model`, in its place; return the model that has it."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # tied weights: what it says of them is tested here
        torch.manual_seed(seed)  # PEFT begins with random values, too
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
                elif parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        adapted.save_pretrained(str(folder))
    return adapted.eval()


def greedy_ids(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Continue a prompt with transformers; nothing ends it early."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            eos_token_id=None,
            do_sample=False,
        )
    return [int(token) for token in ids[0, len(prompt) :]]


def run_engine(
    base: Path,
    adapting: Adapting,
    lora_ids: Collection[int],
    prompt: list[int],
    num_tokens: int,
    *,
    parallel: dict[str, int] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the answers of one batch, with these adapters, of an engine of so many ranks.

    options:  of the section engine
    """
    team = ThreadTeam(adapting=adapting)
    engine_args = {"kv_tokens": 2048, "num_threads": 1} | options
    config = parse_args(
        {
            "model": {"path": str(base), "dtype": "float32"},
            "engine": engine_args,
            "parallel": parallel or {},
        }
    )
    others = team if parallel else None
    engine = build_engine(config, adapting=adapting, team=others, show_progress=False).engine
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in lora_ids]
    try:
        for place, lora_id in enumerate(lora_ids):
            engine.add(
                Request(
                    request_id=str(place), prompt_ids=prompt, sampling=sampling, lora_id=lora_id
                )
            )
        while engine.has_work:
            for output in engine.step():
                answers[int(output.request_id)] += output.token_ids
            engine.check_integrity()
    finally:
        engine.close()
        team.join()
    assert team.errors == []
    return answers
