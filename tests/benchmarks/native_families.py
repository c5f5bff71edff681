"""Decode steps of one random model, by the native step program and by torch, in turns.

    python tests/benchmarks/native_families.py [gemma3] [--dtype bfloat16] [--threads 2] [--rows 1]
        [--quantization int8]

Prints the median milliseconds of both and how many times as fast the native one is: the median over
the turns, with the quartiles. Only native weights are quantised. Weights are random, K and V of the
context zero: neither changes what is computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from remora.configs.environment import cache_dir
from remora.engine.attention.latent import PagedLatents
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.graphs.step_builder import StepProgramBuilder, StepShape
from remora.engine.graphs.step_program import StepProgram
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.models.architectures import parse_config
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.protocols import AttentionBackend, ForwardPass
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.forward import DTYPES
from remora.engine.runner.inputs import InputBatch, StepInputs
from remora.engine.types import RowInit, SamplingParams, StepPlan
from remora.kernels.cpu.build import load_library
from remora.kernels.cpu.library import Format, Library, Team
from tests.engine.graphs.stepping import QUANTIZED_FORMATS

CONTEXT, PAGE_SIZE = 256, 16
PAGES = CONTEXT // PAGE_SIZE + 1  # of a row
COMMON = {"vocab_size": 32_000, "num_hidden_layers": 8, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "gpt-neox": {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 1440,
        "intermediate_size": 1440,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "rope_scaling": {"rope_type": "default"},
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 3584,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
}


def make_model(config: DecoderConfig, dtype: torch.dtype) -> DecoderModel:
    model = DecoderModel(config, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for shard in model.tensors().values():
        shard.memory.normal_(0.0, 0.02, generator=generator)
    return model


def make_native(
    config: DecoderConfig,
    dtype: str,
    quantization: str,
    table: InputBatch,
    rows: int,
    threads: int,
) -> StepProgram:
    shape = StepShape(
        max_tokens=max(rows, 64),
        max_rows=rows,
        num_pages=rows * PAGES,
        page_size=PAGE_SIZE,
        max_positions=PAGES * PAGE_SIZE,
    )
    team = Team(Library(load_library(cache_dir() / "kernels")), threads)
    plain = Format.of(DTYPES[dtype])
    formats = QUANTIZED_FORMATS.get(quantization, WeightFormats(layers=plain, head=plain))
    model = make_model(config, DTYPES[dtype])
    return StepProgramBuilder(model, team, shape, table, formats).build()


def make_torch(config: DecoderConfig, dtype: str, rows: int) -> EagerForward:
    model = make_model(config, DTYPES[dtype])
    model.pack()
    return EagerForward(model, make_attention(config, dtype, rows), page_size=PAGE_SIZE)


def make_attention(config: DecoderConfig, dtype: str, rows: int) -> AttentionBackend:
    latent = config.attention.latent
    if latent is not None:
        return PagedLatents(
            num_layers=config.num_layers,
            num_pages=rows * PAGES,
            page_size=PAGE_SIZE,
            row_size=latent.size + latent.rotary_size,
            latent_size=latent.size,
            dtype=DTYPES[dtype],
            device="cpu",
        )
    return TorchAttention(
        num_layers=config.num_layers,
        num_pages=rows * PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=DTYPES[dtype],
        device="cpu",
    )


def make_inputs(table: InputBatch, rows: int) -> StepInputs:
    """Start rows, and lay out one token of each after the context."""
    tokens = np.random.default_rng(0).integers(10, 10_000, (rows, CONTEXT + 1))
    added = tuple(
        RowInit(
            row=row,
            token_ids=tokens[row],
            num_prompt_tokens=CONTEXT + 1,
            seed=0,
            sampling=SamplingParams(),
            adapter_slot=0,
        )
        for row in range(rows)
    )
    for init in added:
        table.start(init)
    page_rows = np.repeat(np.arange(rows, dtype=np.int32), PAGES)
    page_ids = np.arange(1, rows * PAGES + 1, dtype=np.int32)
    table.add_pages(page_rows, page_ids)
    return table.inputs(
        StepPlan(
            step_id=0,
            added=added,
            dropped=np.empty(0, np.int32),
            page_rows=page_rows,
            page_ids=page_ids,
            rows=np.arange(rows, dtype=np.int32),
            starts=np.full(rows, CONTEXT, np.int32),
            num_tokens=np.ones(rows, np.int32),
            samples=np.ones(rows, np.bool_),
        )
    )


def measure(arms: tuple[ForwardPass, ForwardPass], inputs: StepInputs, turns: int) -> None:
    """Print both arms' milliseconds, and the first one's speed relative to the second."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 3):
        for arm, taken in zip(arms, seconds, strict=True):
            started = time.perf_counter()
            arm.forward(inputs)
            if turn >= 3:
                taken.append(time.perf_counter() - started)
    speeds = [slow / fast for fast, slow in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(speeds, n=4)
    native, eager = (statistics.median(taken) * 1e3 for taken in seconds)
    sys.stdout.write(
        f"native {native:.2f} ms, torch {eager:.2f} ms: "
        f"{middle:.2f} times as fast ({low:.2f} to {high:.2f})\n"
    )


@torch.inference_mode()
def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="gemma3", choices=MODELS)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--quantization", default="none", choices=("none", *QUANTIZED_FORMATS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = parse_config({**COMMON, **MODELS[options.model]})
    table = InputBatch(max_rows=options.rows, max_tokens=PAGES * PAGE_SIZE, page_size=PAGE_SIZE)
    native = make_native(
        config, options.dtype, options.quantization, table, options.rows, options.threads
    )
    eager = make_torch(config, options.dtype, options.rows)
    kind = options.dtype if options.quantization == "none" else options.quantization
    sys.stdout.write(f"{options.model}, {kind}, {options.threads} threads, {options.rows} rows: ")
    measure((native, eager), make_inputs(table, options.rows), options.turns)
    native.close()


if __name__ == "__main__":
    main()
