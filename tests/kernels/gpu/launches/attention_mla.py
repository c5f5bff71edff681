"""Launches of attention over latents: shapes of DeepSeek-V2-Lite and of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable

import torch

from remora.kernels.attention.mla import attend_latents, extend_over_latents

ROWS, TOKENS, PAGE_SIZE, NUM_PAGES, LATENT, ROTATED = 64, 4096, 16, 4096, 512, 64


def launch(num_heads: int, dtype: torch.dtype) -> None:
    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ints = torch.int32
    pages = empty(NUM_PAGES, PAGE_SIZE, LATENT + ROTATED, dtype=dtype)
    tables, lengths = empty(ROWS, 512, dtype=ints), empty(ROWS, dtype=ints)
    attend_latents(
        empty(ROWS, num_heads, LATENT + ROTATED, dtype=dtype),
        pages,
        tables,
        lengths,
        latent_size=LATENT,
        scale=0.1,
    )
    extend_over_latents(
        empty(TOKENS, num_heads, LATENT + ROTATED, dtype=dtype),
        pages,
        tables,
        empty(ROWS + 1, dtype=ints),
        lengths,
        latent_size=LATENT,
        scale=0.1,
    )


def case(num_heads: int, dtype: torch.dtype) -> Callable[[], None]:
    return lambda: launch(num_heads, dtype)


LAUNCHES = {
    "16 heads": case(16, torch.bfloat16),
    "16 heads, float32": case(16, torch.float32),
    "128 heads": case(128, torch.float16),
}
