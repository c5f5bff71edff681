"""What a layer does to each token for itself, and the choice of tokens at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from remora.kernels.activation import silu_and_mul, silu_and_mul_reference
from remora.kernels.device_sampling import choose_on_device
from remora.kernels.norm import add_rms_norm, rms_norm_reference
from remora.kernels.rope_store import rotate_and_store, rotate_and_store_reference
from remora.kernels.sampling import choose
from tests.benchmarks.gpu.cases.attention import PAGE, Heads
from tests.benchmarks.gpu.timing import Call, KernelCase, Pairs

TOKENS, TINY_TOKENS = (1, 64, 256, 4096), (3,)
ROWS = (1, 8, 64, 256)
# Temperature, top-k and top-p of all rows.
WAYS = {"greedy": (0.0, 0, 1.0), "all": (0.8, 0, 1.0), "top-k 20 top-p 0.9": (0.8, 20, 0.9)}


def cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[KernelCase]:
    for tokens in TINY_TOKENS if tiny else TOKENS:
        yield norm(model, config, tokens)
        yield activation(model, config, tokens)
        yield rope_store(model, config, tokens)
    for rows in TINY_TOKENS if tiny else ROWS:
        for way in WAYS:
            yield sampling(model, config, rows, way)


def norm(model: str, config: dict[str, Any], tokens: int) -> KernelCase:
    hidden = config["hidden_size"]

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        residual, ones = torch.zeros_like(x), torch.ones(hidden, device=device)
        weight = ones.to(dtype)
        return Call(
            lambda: add_rms_norm(x, residual, weight, 1e-5),
            result=lambda: add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)[0],
            expected=lambda result: iter([(result, rms_norm_reference(x.float(), ones, 1e-5))]),
        )

    return KernelCase(
        model=model,
        kernel="add_rms_norm",
        shape=f"{tokens} x {hidden}",
        num_bytes=2.0 * hidden * (4 * tokens + 1),
        make=make,
    )


def activation(model: str, config: dict[str, Any], tokens: int) -> KernelCase:
    inner = config["intermediate_size"]

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        gate_up = torch.randn(tokens, 2 * inner, device=device).to(dtype)
        return Call(
            lambda: silu_and_mul(gate_up),
            expected=lambda result: iter([(result, silu_and_mul_reference(gate_up.float()))]),
        )

    return KernelCase(
        model=model,
        kernel="silu_and_mul",
        shape=f"{tokens} x {inner}",
        num_bytes=2.0 * 3 * inner * tokens,
        make=make,
    )


def rope_store(model: str, config: dict[str, Any], tokens: int) -> KernelCase:
    heads = Heads.of(config)
    of_token = 2 * heads.queries + 4 * heads.kv

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        together = heads.queries + 2 * heads.kv
        qkv = torch.randn(tokens, together, heads.dim, device=device).to(dtype)
        query, key, value = torch.split(qkv, [heads.queries, heads.kv, heads.kv], dim=1)
        cos, sin = torch.randn(2, tokens, heads.dim // 2, device=device).to(dtype).unbind(0)
        pages = 1 + -(-tokens // PAGE)
        shape = 2, pages, PAGE, heads.kv, heads.dim
        kv_pages = torch.zeros(shape, dtype=dtype, device=device)
        slots = PAGE + torch.randperm((pages - 1) * PAGE, device=device)[:tokens]

        def result() -> Tensor:
            stored = torch.zeros_like(kv_pages)
            rotated = rotate_and_store(query, key, value, cos, sin, stored, slots)
            return torch.cat([rotated.flatten(), stored.flatten()])

        def expected(result: Tensor) -> Pairs:
            stored = torch.zeros(shape, device=device)
            q, k, v, c, s = (part.float() for part in (query, key, value, cos, sin))
            rotated = rotate_and_store_reference(q, k, v, c, s, stored, slots)
            yield result, torch.cat([rotated.flatten(), stored.flatten()])

        return Call(
            lambda: rotate_and_store(query, key, value, cos, sin, kv_pages, slots),
            result=result,
            expected=expected,
        )

    return KernelCase(
        model=model,
        kernel="rotate_and_store",
        shape=f"{tokens} tokens",
        num_bytes=tokens * (2.0 * of_token * heads.dim + 2 * heads.dim + 8),
        make=make,
    )


def sampling(model: str, config: dict[str, Any], rows: int, way: str) -> KernelCase:
    vocab_size = config["vocab_size"]
    heat, top_k, top_p = WAYS[way]

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        logits = 3 * torch.randn(rows, vocab_size, device=device)
        original = logits.clone()  # choosing may overwrite them
        temperature = torch.full((rows,), heat, device=device)
        keys = torch.randint(-(2**62), 2**62, (rows,), device=device)
        filters = {
            "top_k": torch.full((rows,), top_k, device=device),
            "top_p": torch.full((rows,), top_p, dtype=torch.float64, device=device),
            "min_p": torch.zeros(rows, device=device),
        }

        def result() -> Tensor:
            return choose_on_device(original.clone(), temperature, keys, **filters)[0]

        def expected(result: Tensor) -> Pairs:
            of_rows = [each.cpu().numpy() for each in (temperature, keys)]
            of_filters = {name: each.cpu().numpy() for name, each in filters.items()}
            ids, _ = choose(original.cpu(), *of_rows, **of_filters)
            yield result, torch.from_numpy(ids).to(device)

        return Call(
            lambda: choose_on_device(logits, temperature, keys, **filters),
            result=result,
            expected=expected,
        )

    return KernelCase(
        model=model,
        kernel="choose_on_device",
        shape=f"{rows} x {vocab_size} {way}",
        num_bytes=4.0 * rows * vocab_size,
        make=make,
    )
