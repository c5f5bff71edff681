"""Attention of a layer: decode steps, prompts, and steps of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from remora.kernels.attention.decode import attend_decode_paged
from remora.kernels.attention.prefill import attend_extend
from tests.benchmarks.gpu.timing import Case

PAGE = 16
DECODES = tuple((rows, context) for context in (1024, 8192) for rows in (1, 8, 64, 256))
PROMPTS = (512, 4096, 16384)
MIXED = ((64, 1024), 512)  # decode rows at a context, and a prompt
TINY_DECODES, TINY_PROMPTS, TINY_MIXED = ((2, 20),), (18,), ((2, 20), 10)


def cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[Case]:
    """Yield what a layer of a model has to attend to."""
    for rows, context in TINY_DECODES if tiny else DECODES:
        for dtype in (None, torch.int8):
            yield decode(model, config, rows, context, dtype)
    for num_tokens in TINY_PROMPTS if tiny else PROMPTS:
        yield extend(model, config, "prompt", [(num_tokens, num_tokens)])
    (rows, context), prompt = TINY_MIXED if tiny else MIXED
    yield extend(model, config, "mixed", [*[(1, context)] * rows, (prompt, prompt)])


def decode(
    model: str, config: dict[str, Any], rows: int, context: int, dtype: torch.dtype | None
) -> Case:
    """Return a decode step; dtype: of pages, None = of the queries."""
    heads, kv_heads, head_dim = heads_of(config)
    of_token = head_dim * 2 if dtype is None else head_dim + 4
    num_bytes = rows * (context * 2 * kv_heads * of_token + 2 * heads * head_dim * 2)

    def make(device: torch.device, of_query: torch.dtype) -> Callable[[], object]:
        query = torch.randn(rows, heads, head_dim, device=device).to(of_query)
        pages, tables, scales = make_pages(config, [context] * rows, device, dtype or of_query)
        lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        return lambda: attend_decode_paged(
            query, pages, tables, lengths, scale=0.1, window=None, kv_scales=scales
        )

    return Case(
        model=model,
        kernel="attend_decode_paged" if dtype is None else f"attend_decode_paged {str(dtype)[6:]}",
        shape=f"{rows} x {context}",
        num_bytes=num_bytes,
        make=make,
    )


def extend(model: str, config: dict[str, Any], name: str, rows: list[tuple[int, int]]) -> Case:
    """Return a step of rows: new tokens, and tokens in all."""
    heads, kv_heads, head_dim = heads_of(config)
    new = sum(count for count, _ in rows)
    num_bytes = 2 * head_dim * (sum(2 * kv_heads * length for _, length in rows) + 2 * heads * new)
    seen = sum(count * (length - (count - 1) / 2) for count, length in rows)

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
        query = torch.randn(new, heads, head_dim, device=device).to(dtype)
        lengths = [length for _, length in rows]
        pages, tables, _ = make_pages(config, lengths, device, dtype)
        counts = torch.tensor([0, *(count for count, _ in rows)], dtype=torch.int32)
        starts = counts.cumsum(0, dtype=torch.int32).to(device)
        of_rows = torch.tensor(lengths, dtype=torch.int32, device=device)
        return lambda: attend_extend(query, pages, tables, starts, of_rows, scale=0.1, window=None)

    return Case(
        model=model,
        kernel="attend_extend",
        shape=f"{name} {new}" if len(rows) == 1 else f"{name} {len(rows) - 1} + {rows[-1][0]}",
        num_bytes=num_bytes,
        flops=4.0 * seen * heads * head_dim,
        make=make,
    )


def heads_of(config: dict[str, Any]) -> tuple[int, int, int]:
    return config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]


def make_pages(
    config: dict[str, Any], lengths: list[int], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return pages, tables of rows whose pages lie anywhere, and scales of pages of 8 bits."""
    _, kv_heads, head_dim = heads_of(config)
    of_row = -(-max(lengths) // PAGE)
    counts = [-(-length // PAGE) for length in lengths]
    shape = (2, 1 + sum(counts), PAGE, kv_heads)
    scales = None
    if dtype == torch.int8:
        pages = torch.randint(-127, 128, (*shape, head_dim), dtype=dtype, device=device)
        scales = torch.full(shape, 0.01, device=device)
    else:
        pages = torch.empty((*shape, head_dim), dtype=dtype, device=device).normal_()
    ids = 1 + torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.zeros(len(lengths), of_row, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = ids[first : first + count]
        first += count
    return pages, tables.to(device), scales
