"""Launches of attention: shapes of Llama-3.1-8B, of models with heads of 64 and of 256, and over
latents of DeepSeek-V2-Lite and of DeepSeek-V3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from remora.kernels.attention.decode import attend_decode_paged
from remora.kernels.attention.mla import attend_latents, extend_over_latents
from remora.kernels.attention.prefill import attend_extend
from remora.kernels.gpu import arch
from remora.kernels.gpu.arch import Arch
from tests.kernels.gpu.devices import empty

PAGE_SIZE, NUM_PAGES, LATENT, ROTATED = 16, 4096, 512, 64
INT = torch.int32
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def launch(
    decodes: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    with_sinks: bool = False,
    **options: Any,
) -> None:
    """Decode a token of each of 64 rows, or extend 8 rows by 8192 tokens."""
    num_rows, num_tokens = (64, 64) if decodes else (8, 8192)
    pages = (2, NUM_PAGES, PAGE_SIZE, num_kv_heads)
    bounds = [empty(num_rows, dtype=INT)]
    if not decodes:
        bounds.insert(0, empty(num_rows + 1, dtype=INT))
    attend = attend_decode_paged if decodes else attend_extend
    attend(
        empty(num_tokens, num_heads, head_dim, dtype=dtype),
        empty(*pages, head_dim, dtype=kv_dtype or dtype),
        empty(num_rows, 512, dtype=INT),
        *bounds,
        kv_scales=None if kv_dtype is None else empty(*pages, dtype=BF16),
        sinks=empty(num_heads) if with_sinks else None,
        **{"scale": 0.1, "window": None, **options},
    )


def launch_e4m3() -> None:
    """Decode pages of float8_e4m3fn where the GPU converts it."""
    if arch.arch_of(torch.device("meta")) not in (Arch.AMPERE, Arch.CDNA):
        launch(True, 32, 8, 128, BF16, torch.float8_e4m3fn)


def launch_latents(num_heads: int, dtype: torch.dtype) -> None:
    """Decode 64 rows, and extend them by 4096 tokens."""
    query = empty(4096, num_heads, LATENT + ROTATED, dtype=dtype)
    rows = empty(NUM_PAGES, PAGE_SIZE, LATENT + ROTATED, dtype=dtype), empty(64, 512, dtype=INT)
    starts, lengths = empty(65, dtype=INT), empty(64, dtype=INT)
    attend_latents(query[:64], *rows, lengths, latent_size=LATENT, scale=0.1)
    extend_over_latents(query, *rows, starts, lengths, latent_size=LATENT, scale=0.1)


LAUNCHES = {
    "decode, heads of 128": partial(launch, True, 32, 8, 128, BF16),
    "decode, heads of 128, float32": partial(launch, True, 32, 8, 128, FP32),
    "decode, heads of 128, int8": partial(launch, True, 32, 8, 128, BF16, torch.int8),
    "decode, heads of 128, e5m2": partial(launch, True, 32, 8, 128, FP16, torch.float8_e5m2),
    "decode, heads of 128, e4m3fn": launch_e4m3,
    "decode, heads of 64, 64 to a K/V head": partial(launch, True, 64, 1, 64, BF16),
    "extend, heads of 128": partial(launch, False, 32, 8, 128, BF16),
    "extend, heads of 128, float32": partial(launch, False, 32, 8, 128, FP32),
    "extend, heads of 128, int8": partial(launch, False, 32, 8, 128, BF16, torch.int8),
    "extend, heads of 64": partial(launch, False, 14, 2, 64, FP16),
    **{
        f"{name}, {case}": partial(launch, decodes, *shape, BF16, **options)
        for name, decodes in (("decode", True), ("extend", False))
        for case, shape, options in (
            ("heads of 64, sinks", (64, 8, 64), {"with_sinks": True}),
            ("heads of 256, capped, window", (8, 4, 256), {"soft_cap": 50.0, "window": 4096}),
        )
    },
    "latents, 16 heads": partial(launch_latents, 16, BF16),
    "latents, 16 heads, float32": partial(launch_latents, 16, FP32),
    "latents, 128 heads": partial(launch_latents, 128, FP16),
}
