"""Shapes that no interpreter reaches: most splits, long rows, large pools, every launch's table.

They are compared (`stages/correctness.py`), not timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from remora.kernels.attention.mla import (
    attend_latents,
    attend_latents_reference,
    extend_over_latents,
    extend_over_latents_reference,
)
from tests.benchmarks.gpu.cases.attention import COMPARED, PAGE, Heads, decode, extend
from tests.benchmarks.gpu.cases.products import product
from tests.benchmarks.gpu.timing import Call, KernelCase, Pairs
from tests.kernels.quantised_weights import MAKERS

POOL_BYTES = 100e9
ROOM = 0.7  # of free memory, for a pool that does not fit otherwise
LLAMA = Heads(32, 8, 128)
LATENT, ROTATED = 512, 64
FORMATS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def cases(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield what is most likely wrong first."""
    yield from pools(tiny=tiny)
    yield from cases_without_pools(tiny=tiny)


def cases_without_pools(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield the others, which do not depend on the memory of a device."""
    yield from launches_of_attention(tiny=tiny)
    for num_heads in (2,) if tiny else (16, 128):
        for dtype in (torch.float32,) if tiny else (torch.bfloat16, torch.float32):
            yield from latents(num_heads, dtype, tiny=tiny)
    yield from launches_of_products(tiny=tiny)


def pools(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield rows whose pages lie behind as many others as fit, where offsets exceed 32 bits."""
    heads = Heads(2, 1, 16) if tiny else LLAMA
    spare = spare_pages(heads, tiny=tiny)
    long, many = (70, 3) if tiny else (131072, 64)
    yield named(decode("pool", heads, many, 20 if tiny else 1024, spare_pages=spare), spare)
    yield named(decode("pool", heads, 1, long, spare_pages=spare), spare)
    prompt = 20 if tiny else 16384
    yield named(extend("pool", heads, "prompt", [(prompt, prompt)], spare_pages=spare), spare)


def spare_pages(heads: Heads, *, tiny: bool) -> int:
    if tiny:
        return 3
    of_page = 2 * PAGE * heads.kv * heads.dim * 2
    return int(min(POOL_BYTES, ROOM * torch.cuda.mem_get_info()[0]) // of_page)


def named(case: KernelCase, spare: int) -> KernelCase:
    return replace(case, shape=f"{case.shape} behind {spare} pages")


def launches_of_attention(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield every entry of the tables: head sizes, and formats of queries and pages."""
    rows, context, prompt = (2, 20, 18) if tiny else (8, 4000, 2000)
    for size in (16,) if tiny else (64, 80, 128, 256):
        heads = Heads(4, 2, size) if tiny else Heads(16, 4, size)
        for dtype in (None, *FORMATS):
            name = f"heads of {size}"
            yield decode(name, heads, rows, context, dtype)
            yield extend(name, heads, "prompt", [(prompt, prompt)], dtype)
        wide = "float32"
        yield decode(wide, heads, rows, context, of_query=torch.float32)
        yield extend(wide, heads, "prompt", [(prompt, prompt)], of_query=torch.float32)
    if not tiny:  # one row of 49 splits; rows of very different lengths; one K/V head
        yield decode("splits", LLAMA, 1, 49 * 128)
        yield decode("splits", LLAMA, 1, 100_000)
        yield decode("splits", Heads(64, 1, 64), 3, 5000)
        yield extend("splits", LLAMA, "cached", [(700, 20_000), (1, 9000), (64, 64), (1, 1)])


def latents(num_heads: int, dtype: torch.dtype, *, tiny: bool) -> Iterator[KernelCase]:
    """Yield attention over latents: of tokens of several rows, and of a prompt."""
    rows, context, prompt = (2, 20, 18) if tiny else (16, 4096, 2048)
    of_token = LATENT + ROTATED

    def make(is_decode: bool, device: torch.device, _: torch.dtype) -> Call:
        num_rows, length = (rows, context) if is_decode else (1, prompt)
        num_tokens = rows if is_decode else prompt
        query = torch.randn(num_tokens, num_heads, of_token, device=device).to(dtype)
        of_row = -(-length // PAGE)
        pages = torch.randn(1 + num_rows * of_row, PAGE, of_token, device=device).to(dtype)
        tables = 1 + torch.randperm(num_rows * of_row, device=device).to(torch.int32)
        tables = tables.view(num_rows, of_row)
        lengths = torch.full((num_rows,), length, dtype=torch.int32, device=device)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)

        def run() -> Tensor:
            if is_decode:
                return attend_latents(query, pages, tables, lengths, latent_size=LATENT, scale=0.05)
            return extend_over_latents(
                query, pages, tables, starts, lengths, latent_size=LATENT, scale=0.05
            )

        def expected(result: Tensor) -> Pairs:
            if is_decode:
                out = torch.empty(result.shape, device=device)
                wide = query.float()
                yield (
                    result,
                    attend_latents_reference(wide, pages, tables, lengths, scale=0.05, out=out),
                )
                return
            for first in range(0, prompt, max(16, prompt // COMPARED)):
                own = slice(first, min(prompt, first + 16))
                out = torch.empty(result[own].shape, device=device)
                bounds = torch.tensor([0, own.stop - own.start])
                extend_over_latents_reference(
                    query[own].float(),
                    pages,
                    tables,
                    bounds,
                    torch.tensor([own.stop]),
                    scale=0.05,
                    out=out,
                )
                yield result[own], out

        return Call(run, expected=expected)

    for name, is_decode in (("attend_latents", True), ("extend_over_latents", False)):
        yield KernelCase(
            model=f"{num_heads} heads",
            kernel=f"{name} {str(dtype)[6:]}",
            shape=f"{rows} x {context}" if is_decode else f"prompt {prompt}",
            num_bytes=0.0,
            make=partial(make, is_decode),
        )


def launches_of_products(*, tiny: bool) -> Iterator[KernelCase]:
    """Yield every format of weights with rows for each launch of the tables."""
    outputs, inputs = (90, 256) if tiny else (4096, 4096)
    for kind in MAKERS:
        for rows in (3,) if tiny else (5, 20, 50, 300):
            yield product("launches", f"linear_quant {kind}", "o", rows, outputs, inputs)
