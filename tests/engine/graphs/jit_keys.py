"""Report which kernels a step would compile although warm-up has run.

    python tests/engine/graphs/jit_keys.py MAX_ROWS MAX_TOKENS STRIDE MODEL_FOLDER...

A program of its own, because triton either interprets or compiles for as long as a process lives.
A GPU is pretended: launches only record their keys, and torch's operations run on a CPU, on memory
that no kernel has written. Prints a line of JSON for each model: its folder, the number of keys of
warm-up, and keys that other steps need, each with the first step that does.

STRIDE: of the sizes of steps; 1 = every number of tokens
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.kernels.gpu.ahead.absent import Key, pretend, record_keys  # isort: skip

import numpy as np
import torch
from torch import Tensor

from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.graph_sizes import graph_sizes, prompt_sizes
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan
from remora.engine.models.config import MLPConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.runner import device
from remora.engine.runner.inputs import StepInputs, dummy_step
from remora.engine.sampling.token_sampler import Draws, TokenSampler
from remora.kernels import sampling
from remora.kernels.gpu.arch import Arch
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import Rerun
from tests.engine.loaded import load

NUM_SLOTS, MAX_RANK = 3, 12
TARGETS = ("embed_tokens", "q_proj", "o_proj", "gate_proj", "down_proj", "lm_head")
CPU = torch.device("cpu")


def main(max_rows: int, max_tokens: int, stride: int, folders: list[str]) -> None:
    torch.set_num_threads(1)
    keys = record_keys()
    for folder in folders:
        for deterministic, captures_prompts in ((False, False), (True, False), (False, True)):
            pretend(Arch.HOPPER, "cpu")
            keys.clear()
            held = "dequantised" if deterministic else "stored"
            model = load(Path(folder), torch.bfloat16, held=held)
            if deterministic and model.config.attention.latent is not None:
                continue
            plan = plan_of(model, max_rows, max_tokens, deterministic=deterministic)
            if captures_prompts:
                how = replace(plan.on_device, graph_prompt_sizes=prompt_sizes(max_tokens))
                plan = replace(plan, on_device=how)
            warm, missing = compare(model, plan, keys, stride)
            made = {"folder": folder, "deterministic": deterministic, "warm": warm}
            made["captures_prompts"] = captures_prompts
            sys.stdout.write(json.dumps({**made, "missing": missing}) + "\n")


def compare(
    model: DecoderModel, plan: EnginePlan, keys: set[Key], stride: int
) -> tuple[int, dict[str, str]]:
    """Return the number of keys of warm-up, and the keys that only later steps record."""
    if plan.adapters is not None:
        model.allocate_slots(plan.adapters)
    forward = device.make_forward(model, plan, num_pages=64)
    token_sampler = device.make_token_sampler(plan)
    device.warm_up(forward, plan)
    device.warm_up_sampling(token_sampler, model.vocab_size, CPU)
    device.capture(forward, plan, Rerun(), show_progress=False)
    warm = set(keys)
    missing: dict[str, str] = {}
    draw = np.random.default_rng(0)
    for step in steps_of(plan, stride):
        sample(token_sampler, forward.forward(step), draw)
        described = f"{step.num_tokens} tokens, {len(step.rows)} rows, {step.num_decodes} of one"
        for key in keys - warm:
            missing.setdefault(" ".join(key), described)
    return len(warm), missing


def plan_of(
    model: DecoderModel, max_rows: int, max_tokens: int, *, deterministic: bool
) -> EnginePlan:
    """Return the plan of a device with Triton, with adapter slots where the model has them."""
    room = None
    is_dense = all(isinstance(layer.mlp, MLPConfig) for layer in model.config.layers)
    if is_dense and not deterministic:
        room = LoRASlotConfig(num_slots=NUM_SLOTS, max_rank=MAX_RANK, targets=TARGETS)
    sizes = graph_sizes(most=max_rows)
    return make_plan(
        adapters=room,
        page_size=16,
        num_pages=64,
        max_model_len=max_tokens,
        max_running_requests=max_rows,
        max_step_tokens=max_tokens,
        on_device=DevicePlan(
            attention_backend="triton", graph_sizes=sizes, deterministic=deterministic
        ),
    )


def steps_of(plan: EnginePlan, stride: int) -> Iterator[StepInputs]:
    """Yield steps of all sizes: with few and many rows, some of which decode, with adapters."""
    draw = np.random.default_rng(0)
    max_pages = -(-plan.max_sequence_tokens // plan.page_size)
    for num_tokens in range(1, plan.max_step_tokens + 1, stride):
        most = min(num_tokens, plan.max_running_requests)
        for num_rows in {1, most, int(draw.integers(1, most + 1))}:
            step = dummy_step(num_tokens, num_rows, max_pages)
            adapters = draw.integers(0, NUM_SLOTS + 1, num_tokens).astype(np.int32)
            for slots in (step.adapters, adapters) if plan.adapters else (step.adapters,):
                yield replace(step, adapters=slots)


def sample(token_sampler: TokenSampler, logits: Tensor, draw: np.random.Generator) -> None:
    """Mask, edit and choose tokens of a step, and describe some of them."""
    num_lines, vocab_size = logits.shape
    some = np.sort(draw.permutation(num_lines)[: draw.integers(1, num_lines + 1)])
    words = np.zeros((len(some), -(-vocab_size // 32)), np.int32)
    token_sampler.kernels.mask_tokens(logits, some, words)
    entries = torch.zeros(int(draw.integers(1, 1000)), dtype=torch.int64)
    amounts = entries.float()
    sampling.add_at(logits, entries, entries, amounts)
    sampling.penalize(
        logits, entries, entries, amounts, repetition=amounts, presence=amounts, frequency=amounts
    )
    draws = Draws(
        temperature=np.ones(num_lines, np.float32),
        keys=np.arange(num_lines),
        top_k=np.full(num_lines, 5),
        top_p=np.full(num_lines, 0.9),
        min_p=np.full(num_lines, 0.1, np.float32),
    )
    chosen = token_sampler.choose(logits, draws if draw.random() < 0.5 else None)
    token_sampler.describe(logits, some, chosen, int(draw.integers(0, 21)))


if __name__ == "__main__":
    rows, tokens, stride = map(int, sys.argv[1:4])
    main(rows, tokens, stride, sys.argv[4:])
