"""Logits and greedy tokens of the engine's model beside transformers', on the same random weights.

Both compute in bfloat16. The tokens of transformers are given to both, so that one difference does
not become many; tokens may differ where transformers' two best logits are closer than the logits'
own difference.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remora.engine.models.load import open_weights
from tests.benchmarks.gpu.built import DTYPES, build, checkpoint, step_inputs
from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.rows import Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.shapes import config_of

PROMPT, TOKENS = 256, 64
TINY_PROMPT, TINY_TOKENS = 24, 4
MAX_DIFFERENCE = 0.1  # of the logits' standard deviation, at the 99.9th percentile


def cases(setting: Setting) -> Iterator[Case]:
    about = Row(model=setting.options["model"], what="logits / transformers'")
    yield Case(about, partial(compare, about, setting), 110.0)


def compare(about: Row, setting: Setting) -> Iterator[Row]:
    """Compute a prompt, and tokens after it one by one, by both."""
    _, config = config_of(setting.options["model"], tiny=setting.is_tiny)
    prompt, num_tokens = (TINY_PROMPT, TINY_TOKENS) if setting.is_tiny else (PROMPT, TOKENS)
    ids = np.random.default_rng(3).integers(0, config["vocab_size"], prompt)
    theirs, tokens = by_transformers(config, ids, num_tokens, setting)
    gc.collect()
    ours = by_engine(config, np.concatenate([ids, tokens[:-1]]), prompt, setting)
    spread = theirs.std(dim=1, keepdim=True)
    differences = ((ours - theirs).abs() / spread).flatten()
    most = differences.sort().values[int(0.999 * (len(differences) - 1))]
    row = Row(model=about.model, what=about.what, is_headline=True)
    details = {"greatest": float(differences.max()), "mean": float(differences.mean())}
    yield row.found(float(most), "std", details=details).asking_at_most(MAX_DIFFERENCE)
    best = theirs.topk(2, dim=1).values
    is_near = (best[:, 0] - best[:, 1]) <= 2 * (ours - theirs).abs().amax(dim=1)
    num_other = int(((ours.argmax(1) != theirs.argmax(1)) & ~is_near).sum())
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    greedy = Row(model=about.model, what=f"greedy tokens that differ, of {num_tokens}")
    yield greedy.found(
        num_other, "tokens", details={"same": same}, is_headline=True
    ).asking_at_most(0)


@torch.inference_mode()
def by_transformers(
    config: dict[str, Any], ids: Any, num_tokens: int, setting: Setting
) -> tuple[Tensor, Any]:
    """Return the logits before each greedy token, float32 on the CPU, and the tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = setting.torch_device
    with checkpoint(config) as path:
        with device:
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path),
                dtype=DTYPES[config["torch_dtype"]],
                attn_implementation="sdpa",
            ).eval()
        source = open_weights(path, "dummy", device=device.type)
        state = model.state_dict()
        for name, values in source.read(list(source.shapes())):
            state[name].copy_(values)
    inputs, known, rows, tokens = torch.from_numpy(ids)[None].to(device), None, [], []
    for _ in range(num_tokens):
        output = model(input_ids=inputs, past_key_values=known, use_cache=True)
        known = output.past_key_values
        rows.append(output.logits[0, -1].float().cpu())
        tokens.append(int(rows[-1].argmax()))
        inputs = torch.tensor([[tokens[-1]]], device=device)
    return torch.stack(rows), np.array(tokens)


@torch.inference_mode()
def by_engine(config: dict[str, Any], ids: Any, prompt: int, setting: Setting) -> Tensor:
    """Return the logits after the prompt and after each further token, from decode steps."""
    sizes: dict[str, Any] = {} if setting.is_tiny else {"max_running_requests": 8}
    built = build(config, tiny=setting.is_tiny, **sizes)
    rows = []
    for first, end in [(0, prompt), *((at, at + 1) for at in range(prompt, len(ids)))]:
        inputs = step_inputs(1, first, end - first, grown=True)
        inputs.token_ids[:] = ids[first:end]
        if first > 0:  # decode steps read their tokens from the table of the newest
            newest = torch.tensor([ids[first]], device=setting.torch_device)
            built.forward.set_last_tokens(newest)
        rows.append(built.forward.forward(inputs)[0].float().cpu().clone())
    return torch.stack(rows)
