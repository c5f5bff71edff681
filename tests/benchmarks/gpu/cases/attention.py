"""Attention of a layer: decode steps, prompts, and steps of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.attention.decode import attend_decode_paged
from remora.kernels.attention.prefill import attend_extend
from remora.kernels.attention.rows import attend_row
from tests.benchmarks.gpu.timing import Call, KernelCase, Pairs

PAGE, SCALE = 16, 0.1
DECODES = tuple((rows, context) for context in (1024, 8192) for rows in (1, 8, 64, 256))
PROMPTS = (512, 4096, 16384)
MIXED = ((64, 1024), 512)  # decode rows at a context, and a prompt
TINY_DECODES, TINY_PROMPTS, TINY_MIXED = ((2, 20),), (18,), ((2, 20), 10)
CHUNK = 256  # queries that are compared at once
COMPARED = 24  # rows or chunks that are compared at most


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a layer."""

    queries: int
    kv: int
    dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Heads:
        """Return a model's."""
        of_kv = config["num_key_value_heads"]
        return cls(config["num_attention_heads"], of_kv, config["head_dim"])


def cases(model: str, config: dict[str, Any], *, tiny: bool) -> Iterator[KernelCase]:
    """Yield what a layer of a model has to attend to."""
    heads = Heads.of(config)
    for rows, context in TINY_DECODES if tiny else DECODES:
        for dtype in (None, torch.int8):
            yield decode(model, heads, rows, context, dtype)
    for num_tokens in TINY_PROMPTS if tiny else PROMPTS:
        yield extend(model, heads, "prompt", [(num_tokens, num_tokens)])
    (rows, context), prompt = TINY_MIXED if tiny else MIXED
    yield extend(model, heads, "mixed", [*[(1, context)] * rows, (prompt, prompt)])


def decode(
    model: str,
    heads: Heads,
    rows: int,
    context: int,
    kv_dtype: torch.dtype | None = None,
    *,
    of_query: torch.dtype | None = None,
    spare_pages: int = 0,
) -> KernelCase:
    """Return a decode step.

    kv_dtype:     of pages; None = of the queries
    of_query:     None = of activations
    spare_pages:  of the pool, which lie before those of the rows
    """
    of_token = heads.dim * 2 if kv_dtype is None else heads.dim + 4
    num_bytes = rows * (context * 2 * heads.kv * of_token + 2 * heads.queries * heads.dim * 2)

    def make(device: torch.device, activations: torch.dtype) -> Call:
        dtype = of_query or query_format(device, activations, kv_dtype)
        query = torch.randn(rows, heads.queries, heads.dim, device=device).to(dtype)
        pages, tables, scales = make_pages(
            heads, [context] * rows, device, kv_dtype or dtype, spare_pages
        )
        lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"scale": SCALE, "window": None, "kv_scales": scales}

        def expected(result: Tensor) -> Pairs:
            for row in some(rows):
                own = slice(row, row + 1)
                yield (
                    result[own],
                    attend_row(query[own].float(), pages, tables[row], context, **options),
                )

        def run() -> Tensor:
            return attend_decode_paged(query, pages, tables, lengths, **options)

        peers = {} if kv_dtype or spare_pages else {"sdpa": sdpa(query[:, :, None], heads, context)}
        return Call(run, expected=expected, peers=peers)

    return KernelCase(
        model=model,
        kernel="attend_decode_paged" + ("" if kv_dtype is None else f" {str(kv_dtype)[6:]}"),
        shape=f"{rows} x {context}",
        num_bytes=num_bytes,
        make=make,
        peers=() if kv_dtype or spare_pages else ("sdpa",),
    )


def extend(
    model: str,
    heads: Heads,
    name: str,
    rows: Sequence[tuple[int, int]],
    kv_dtype: torch.dtype | None = None,
    *,
    of_query: torch.dtype | None = None,
    spare_pages: int = 0,
) -> KernelCase:
    """Return a step of rows: new tokens, and tokens in all; options as of `decode`."""
    new = sum(count for count, _ in rows)
    of_keys = sum(2 * heads.kv * length for _, length in rows)
    seen = sum(count * (length - (count - 1) / 2) for count, length in rows)
    has_peer = len(rows) == 1 and rows[0][0] == rows[0][1] and kv_dtype is None and not spare_pages

    def make(device: torch.device, activations: torch.dtype) -> Call:
        dtype = of_query or query_format(device, activations, kv_dtype)
        query = torch.randn(new, heads.queries, heads.dim, device=device).to(dtype)
        lengths = [length for _, length in rows]
        pages, tables, scales = make_pages(heads, lengths, device, kv_dtype or dtype, spare_pages)
        firsts = torch.tensor([0, *(count for count, _ in rows)]).cumsum(0)
        starts = firsts.to(torch.int32).to(device)
        of_rows = torch.tensor(lengths, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"scale": SCALE, "window": None, "kv_scales": scales}

        def expected(result: Tensor) -> Pairs:
            for row in some(len(rows)):
                (count, length), first = rows[row], int(firsts[row])
                for chunk in some(-(-count // CHUNK)):
                    end = min(count, (chunk + 1) * CHUNK)
                    tokens = slice(first + chunk * CHUNK, first + end)
                    known = length - count + end
                    yield (
                        result[tokens],
                        attend_row(query[tokens].float(), pages, tables[row], known, **options),
                    )

        def run() -> Tensor:
            return attend_extend(query, pages, tables, starts, of_rows, **options)

        peers = {"sdpa": sdpa(query.transpose(0, 1)[None], heads, new)} if has_peer else {}
        return Call(run, expected=expected, peers=peers)

    return KernelCase(
        model=model,
        kernel="attend_extend" + ("" if kv_dtype is None else f" {str(kv_dtype)[6:]}"),
        shape=f"{name} {new}" if len(rows) == 1 else f"{name} {len(rows) - 1} + {rows[-1][0]}",
        num_bytes=2 * heads.dim * (of_keys + 2 * heads.queries * new),
        flops=4.0 * seen * heads.queries * heads.dim,
        make=make,
        peers=("sdpa",) if has_peer else (),
    )


def query_format(
    device: torch.device, activations: torch.dtype, kv_dtype: torch.dtype | None
) -> torch.dtype:
    """Return the queries' format; the interpreter does not widen 8 bits to 16."""
    return torch.float32 if device.type == "cpu" and kv_dtype else activations


def sdpa(query: Tensor, heads: Heads, context: int) -> Callable[[], object]:
    """Return torch's attention over keys and values without pages.

    query:  [rows, heads, queries, dim]; with several queries, causal
    """
    shape = len(query), heads.kv, context, heads.dim
    key, value = (
        torch.empty(shape, dtype=query.dtype, device=query.device).normal_() for _ in range(2)
    )
    return lambda: F.scaled_dot_product_attention(
        query, key, value, scale=SCALE, is_causal=query.shape[2] > 1, enable_gqa=True
    )


def some(count: int) -> list[int]:
    """Return up to COMPARED numbers below a count, the first and the last among them."""
    return sorted({round(at * (count - 1) / (COMPARED - 1)) for at in range(COMPARED)})


def make_pages(
    heads: Heads,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    spare_pages: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return pages, tables of rows whose pages lie anywhere, and scales of pages of 8 bits."""
    of_row = -(-max(lengths) // PAGE)
    counts = [-(-length // PAGE) for length in lengths]
    first_page = 1 + spare_pages
    shape = (2, first_page + sum(counts), PAGE, heads.kv)
    pages = torch.empty((*shape, heads.dim), dtype=dtype, device=device)
    used, scales = pages[:, first_page:], None
    if dtype.itemsize > 1:
        used.normal_()
    else:
        values = torch.randn(used.shape, device=device)
        used.copy_((values * 40).clamp(-127, 127).round() if dtype == torch.int8 else values)
        scale = 0.03 if dtype == torch.int8 else 1.0
        scales = torch.full(shape, scale, dtype=torch.bfloat16, device=device)
    ids = first_page + torch.randperm(sum(counts), dtype=torch.int32)
    tables = torch.zeros(len(lengths), of_row, dtype=torch.int32)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = ids[first : first + count]
        first += count
    return pages, tables.to(device), scales
