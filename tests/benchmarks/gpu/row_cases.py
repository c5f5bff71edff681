"""What a layer does to each token for itself, and the choice of tokens at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from remora.kernels.activation import silu_and_mul
from remora.kernels.device_sampling import choose_on_device
from remora.kernels.norm import add_rms_norm
from remora.kernels.rope_store import rotate_and_store
from tests.benchmarks.gpu.attention_cases import PAGE, heads_of
from tests.benchmarks.gpu.timing import Case

TOKENS, TINY_TOKENS = (1, 64, 256, 4096), (3,)
ROWS = (1, 8, 64, 256)
# Temperature, top-k and top-p of all rows.
WAYS = {"greedy": (0.0, 0, 1.0), "all": (0.8, 0, 1.0), "top-k 20 top-p 0.9": (0.8, 20, 0.9)}


def cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[Case]:
    for tokens in TINY_TOKENS if tiny else TOKENS:
        yield norm(model, config, tokens)
        yield activation(model, config, tokens)
        yield rope_store(model, config, tokens)
    for rows in TINY_TOKENS if tiny else ROWS:
        for way in WAYS:
            yield sampling(model, config, rows, way)


def norm(model: str, config: dict[str, Any], tokens: int) -> Case:
    hidden = config["hidden_size"]

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        residual, weight = torch.zeros_like(x), torch.ones(hidden, dtype=dtype, device=device)
        return lambda: add_rms_norm(x, residual, weight, 1e-5)

    return Case(
        model=model,
        kernel="add_rms_norm",
        shape=f"{tokens} x {hidden}",
        num_bytes=2.0 * hidden * (4 * tokens + 1),
        make=make,
    )


def activation(model: str, config: dict[str, Any], tokens: int) -> Case:
    inner = config["intermediate_size"]

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        gate_up = torch.randn(tokens, 2 * inner, device=device).to(dtype)
        return lambda: silu_and_mul(gate_up)

    return Case(
        model=model,
        kernel="silu_and_mul",
        shape=f"{tokens} x {inner}",
        num_bytes=2.0 * 3 * inner * tokens,
        make=make,
    )


def rope_store(model: str, config: dict[str, Any], tokens: int) -> Case:
    heads, kv_heads, head_dim = heads_of(config)
    of_token = 2 * heads + 4 * kv_heads

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
        query, key, value = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        cos, sin = torch.randn(2, tokens, head_dim // 2, device=device).to(dtype).unbind(0)
        pages = 1 + -(-tokens // PAGE)
        kv_pages = torch.zeros(2, pages, PAGE, kv_heads, head_dim, dtype=dtype, device=device)
        slots = PAGE + torch.randperm((pages - 1) * PAGE, device=device)[:tokens]
        return lambda: rotate_and_store(query, key, value, cos, sin, kv_pages, slots)

    return Case(
        model=model,
        kernel="rotate_and_store",
        shape=f"{tokens} tokens",
        num_bytes=tokens * (2.0 * of_token * head_dim + 2 * head_dim + 8),
        make=make,
    )


def sampling(model: str, config: dict[str, Any], rows: int, way: str) -> Case:
    vocab_size = config["vocab_size"]
    heat, top_k, top_p = WAYS[way]

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        logits = 3 * torch.randn(rows, vocab_size, device=device)
        temperature = torch.full((rows,), heat, device=device)
        uniforms = torch.rand(rows, dtype=torch.float64, device=device)
        filters = {
            "top_k": torch.full((rows,), top_k, device=device),
            "top_p": torch.full((rows,), top_p, dtype=torch.float64, device=device),
            "min_p": torch.zeros(rows, device=device),
        }
        return lambda: choose_on_device(logits, temperature, uniforms, **filters)

    return Case(
        model=model,
        kernel="choose_on_device",
        shape=f"{rows} x {vocab_size} {way}",
        num_bytes=4.0 * rows * vocab_size,
        make=make,
    )
