"""Compare the speed of a draft model with what its parts predict.

    python -m tests.benchmarks.speculation.draft_cost [FOLDER]

The target has the shape of Qwen3-0.6B and random weights; the residual branches of its later layers
are scaled by 0.01, so its first layers alone, which are the draft model, are often right. With k
drafts a step yields E = (1 - a^(k + 1)) / (1 - a) tokens, where a is the acceptance rate at k = 1,
and takes the time of a target step with k + 1 tokens and of k draft steps. Each part is measured
by itself, in the same process and in turns.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from remora.configs.environment import cache_dir
from remora.engine.llm import LLM, SamplingParams
from remora.engine.spec.controller import FixedController
from remora.engine.spec.speculation import Speculation
from remora.engine.weights.resolve_model import resolve_model
from tests.engine.spec.proposers import GuessingProposer

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 28, 16, 8, 128, 49_152
DRAFT_LAYERS = 4
LATER_SCALE = 0.01
DRAFTS = (1, 3, 5)
PROMPT, OUTPUT, REPEATS = 64, 128, 3


def write_pair(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write target and draft model; returns their folders."""
    torch.manual_seed(seed)
    shared: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).mul_(0.02).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    layers: list[dict[str, torch.Tensor]] = []
    for number in range(LAYERS):
        scale = 1.0 if number < DRAFT_LAYERS else LATER_SCALE
        prefix = f"model.layers.{number}."
        sizes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN, 1.0),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM, scale),
            "mlp.gate_proj": (INNER, HIDDEN, 1.0),
            "mlp.up_proj": (INNER, HIDDEN, 1.0),
            "mlp.down_proj": (HIDDEN, INNER, scale),
        }
        tensors = {
            f"{prefix}{name}.weight": torch.randn(rows, columns).mul_(0.05 * factor).bfloat16()
            for name, (rows, columns, factor) in sizes.items()
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = torch.ones(HEAD_DIM).bfloat16()
        layers.append(tensors)
    folders = folder / "target", folder / "draft"
    for out, count in zip(folders, (LAYERS, DRAFT_LAYERS), strict=True):
        _write(out, count, shared, layers[:count])
    return folders


def _write(
    out: Path, count: int, shared: dict[str, torch.Tensor], layers: Sequence[dict[str, Any]]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in resolve_model("smollm2-135m-instruct", cache_dir()).glob("*token*"):
        shutil.copy(file, out)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": count,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (out / "config.json").write_text(json.dumps(config))
    tensors = dict(shared)
    for layer in layers:
        tensors |= layer
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def decode(llm: LLM) -> float:
    """Return the decoding speed of one sequence, in tokens per second."""
    llm._engine.flush_cache()
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    first = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = [(7 * place * place + 11 * place) % VOCAB for place in range(PROMPT)]
    llm.generate([prompt], first)
    started = time.perf_counter()
    llm.generate([prompt], params)
    return (OUTPUT - 1) / (time.perf_counter() - started)


def with_drafts(llm: LLM, most: int, guess: Callable[[list[int], int], list[int]]) -> None:
    """Let the engine verify what a function drafts."""
    llm._engine._scheduler.speculation = Speculation(
        GuessingProposer(guess),
        FixedController(most),
        source="oracle",
        max_drafts=most,
        vocab_size=VOCAB,
        eos_token_ids=(),
    )


def speeds(measured: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median speed of each, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(REPEATS):
        for name, measure in measured.items():
            found[name].append(measure())
    return {name: median(values) for name, values in found.items()}


def main(folder: Path) -> None:
    """Measure, and print a table."""
    target, draft = write_pair(folder)
    options: dict[str, Any] = {"kv_tokens": 4096, "max_running_requests": 8, "show_progress": False}
    plain, alone = LLM(str(target), **options), LLM(str(draft), **options)
    drafting = {
        most: LLM(
            str(target),
            speculation={
                "method": "draft",
                "draft_model": str(draft),
                "max_drafts": most,
                "adaptive": False,
            },
            **options,
        )
        for most in DRAFTS
    }

    def verifying(most: int) -> Callable[[], float]:
        def measure() -> float:
            with_drafts(plain, most, lambda known, limit: [known[-1] ^ 1] * limit)
            speed = decode(plain)
            plain._engine._scheduler.speculation = None
            return speed

        return measure

    found = speeds(
        {
            "target": lambda: decode(plain),
            "draft": lambda: decode(alone),
            **{f"verify {most}": verifying(most) for most in DRAFTS},
            **{f"drafts {most}": partial(decode, llm) for most, llm in drafting.items()},
        }
    )
    rates = {}
    for most, llm in drafting.items():
        stats = llm.stats()
        rates[most] = stats.accepted_drafts_total / stats.draft_tokens_total
    rate, draft_s = rates[DRAFTS[0]], 1 / found["draft"]
    print(f"target {found['target']:.1f} tok/s, draft model {found['draft']:.1f}, a = {rate:.3f}")
    print("| k | of drafts right | verifying step, ms | predicted tok/s | measured | ratio |")
    print("|---|---|---|---|---|---|")
    for most in DRAFTS:
        step_s = 1 / found[f"verify {most}"]
        tokens = sum(rate**power for power in range(most + 1))
        predicted = tokens / (step_s + most * draft_s)
        measured = found[f"drafts {most}"]
        print(
            f"| {most} | {rates[most]:.3f} | {1000 * step_s:.1f} | {predicted:.1f} | "
            f"{measured:.1f} | {measured / predicted:.3f} |"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
