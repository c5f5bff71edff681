"""Launches of every kernel on tiny shapes, each with several programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from remora.kernels.activation import silu_and_mul
from remora.kernels.attention.decode import attend_decode_paged
from remora.kernels.attention.mla import attend_latents, extend_over_latents
from remora.kernels.attention.prefill import attend_extend
from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device
from remora.kernels.grammar_mask import mask_tokens_on_device
from remora.kernels.kv_store import store_kv
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.moe import moe
from remora.kernels.moe_routing import route
from remora.kernels.moe_rules import Routing
from remora.kernels.norm import add_rms_norm, rms_norm
from remora.kernels.quantised.linear_quant import linear_quant
from remora.kernels.rope import apply_rope
from remora.kernels.rope_store import rotate_and_store
from remora.kernels.sampling import add_at, penalize
from tests.kernels.gpu.paged import launch_few_programs, make_paged, starts_of
from tests.kernels.gpu.test_lora import make_slots, tiled
from tests.kernels.gpu.test_moe import make_fp8_weights, make_grouped, make_ids, make_weights
from tests.kernels.quantised_weights import MAKERS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CPU = "cpu"


def norms() -> list[Tensor]:
    x, weight = torch.randn(5, 300).to(BF16), torch.randn(300).to(BF16)
    stream = torch.randn(5, 300).to(BF16)
    return [rms_norm(x, weight, 1e-5), *add_rms_norm(x, stream, weight, 1e-5)]


def heads(tokens: int, kv_dtype: torch.dtype) -> list[Tensor]:
    """Rotate, and store with and without rotation."""
    qkv, angles = torch.randn(tokens, 12, 128).to(BF16), torch.randn(tokens, 64).to(BF16)
    pages = torch.zeros(2, 9, 4, 3, 128, dtype=kv_dtype)
    others = pages.clone()
    scales = None if kv_dtype == BF16 else torch.zeros(2, 9, 4, 3, dtype=BF16)
    slots = torch.randperm(36)[:tokens]
    query, key, value = qkv.tensor_split((6, 9), dim=1)
    weight = torch.randn(128).to(BF16)
    out = rotate_and_store(
        query, key, value, angles, angles, pages, slots, scales=scales, norms=(weight, weight),
        eps=1e-6, interleaved=False,
    )  # fmt: skip
    store_kv(key, value, others, slots, scales)
    rotated = apply_rope(query, angles, angles, interleaved=True)
    return [out, pages, others, rotated, *([] if scales is None else [scales])]


def attention(kv_dtype: torch.dtype | None, *, fixed_split: bool = False) -> list[Tensor]:
    """Decode rows of one split and of several, and extend rows by several tiles."""
    rows = [(1, 1), (2, 40), (70, 300), (1, 700)]
    lengths = [length for _, length in rows]
    is_scaled = kv_dtype is not None
    paged = make_paged(
        lengths, device=CPU, num_kv_heads=2, dtype=kv_dtype or BF16, scaled=is_scaled
    )
    given = paged.kv_pages, paged.tables
    scales: dict[str, Any] = {"kv_scales": paged.kv_scales, "scale": 0.2, "window": None}
    query = torch.randn(4, 4, 16).to(BF16)
    decoded = attend_decode_paged(query, *given, paged.lengths, fixed_split=fixed_split, **scales)
    starts = starts_of(rows, 0, CPU)
    new = torch.randn(int(starts[-1]), 4, 16).to(BF16)
    out = torch.zeros_like(new)
    attend_extend(new, *given, starts, paged.lengths, out=out, **scales)
    return [decoded, out]


def latents() -> list[Tensor]:
    rows = [(1, 1), (3, 20), (20, 200)]
    paged = make_paged([length for _, length in rows], device=CPU, head_dim=48, dtype=BF16)
    pages = paged.kv_pages[0].squeeze(2).contiguous()
    starts = starts_of(rows, 0, CPU)
    query = torch.randn(int(starts[-1]), 20, 48).to(BF16)
    how: dict[str, Any] = {"latent_size": 32, "scale": 0.2}
    return [
        attend_latents(query[:3], pages, paged.tables, paged.lengths, **how),
        extend_over_latents(query, pages, paged.tables, starts, paged.lengths, **how),
    ]


def quantised(weight: str, rows: int) -> list[Tensor]:
    x, bias = torch.randn(rows, 1100).to(BF16), torch.randn(200).to(BF16)
    return [linear_quant(x, MAKERS[weight](200, 1100, CPU), bias)]


def invariant(rows: int) -> list[Tensor]:
    x, weight = torch.randn(rows, 1200).to(BF16), torch.randn(200, 1200).to(BF16)
    return [linear_invariant(x, weight, torch.randn(200).to(BF16))]


def experts(tokens: int, *, form: str = "plain") -> list[Tensor]:
    """Route tokens, and compute their experts with few pairs or many."""
    hidden, inner = {"plain": (40, 40), "fp8": (256, 128)}.get(form, (96, 64))
    top_k, num_experts = 4, 6
    logits, slots = torch.randn(tokens, num_experts).to(BF16), torch.arange(tokens) % 4
    ids, weights = route(logits, Routing(top_k=top_k), slots=slots)
    x = torch.randn(tokens, hidden).to(BF16)
    makers: dict[str, Any] = {
        "plain": partial(make_weights, dtype=BF16),
        "fp8": make_fp8_weights,
        "nvfp4": partial(make_grouped, "nvfp4"),
    }
    gate_up, down = makers[form](experts=num_experts, hidden=hidden, inner=inner, device=CPU)
    held = make_ids(tokens, top_k, num_experts, CPU) - 1  # the first is of another rank
    return [ids, weights, moe(x, ids, weights, gate_up, down), moe(x, held, weights, gate_up, down)]


def adapters(num_rows: int) -> list[Tensor]:
    slots = make_slots(
        [[9, 20], [0, 0], [20, 3]], inputs=1100, parts=[100, 70], max_rank=20, device=CPU
    )
    rows = [row % 4 for row in range(num_rows)]
    groups = tiled(rows, CPU)
    y, looked_up = torch.randn(2, num_rows, 170)
    slots.add(torch.randn(num_rows, 1100), y, groups)
    slots.add_looked_up(torch.randint(0, 1100, (num_rows,)), looked_up, groups)
    return [y, looked_up]


def sampling() -> list[Tensor]:
    """Choose greedily, from all tokens, and with each filter; describe; edit."""
    num_rows, vocab_size = 6, 4500
    logits = torch.randn(num_rows, vocab_size) * 3
    filters = {
        "top_k": torch.tensor([0, 0, 5, 0, 0, 900]),
        "top_p": torch.tensor([1, 1, 1, 0.9, 1, 0.8], dtype=torch.float64),
        "min_p": torch.tensor([0, 0, 0, 0, 0.05, 0]),
    }
    heat = torch.tensor([0.0, 1, 1, 0.8, 1, 3])
    keys = torch.randint(-(2**62), 2**62, (num_rows,))
    ids, faults = choose_on_device(logits, heat, keys, **filters)
    described = token_logprobs_on_device(logits, ids, 7)
    lines = torch.tensor([4, -1, 0])
    mask_tokens_on_device(logits, lines, torch.randint(-(2**31), 2**31, (3, 141)).int())
    entries = torch.randperm(num_rows * vocab_size)[:1000]
    at = entries // vocab_size, entries % vocab_size
    amounts = torch.rand(1000)
    add_at(logits, *at, amounts)
    penalties = {"repetition": amounts + 1, "presence": amounts, "frequency": amounts}
    penalize(logits, *at, amounts.round(), **penalties)
    return [ids, faults, *described, logits]


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "norms": norms,
    "activation": lambda: [silu_and_mul(torch.randn(3, 2400).to(BF16))],
    **{f"heads {dtype}": partial(heads, 5, dtype) for dtype in (BF16, torch.int8, FP8)},
    "attention": partial(attention, None),
    "attention, fixed splits": partial(attention, None, fixed_split=True),
    "attention int8": partial(attention, torch.int8),
    "latents": latents,
    **{
        f"{name}, {rows} rows": partial(quantised, name, rows)
        for name in MAKERS
        for rows in (3, 40)
    },
    **{f"invariant, {rows} rows": partial(invariant, rows) for rows in (3, 70)},
    **{f"experts, {tokens} tokens": partial(experts, tokens) for tokens in (3, 20)},
    **{f"experts {form}": partial(experts, 3, form=form) for form in ("fp8", "nvfp4")},
    **{f"adapters, {rows} rows": partial(adapters, rows) for rows in (9, 180)},
    "sampling": sampling,
}


def few_programs(patch: pytest.MonkeyPatch) -> None:
    """Let launches have fewer programs than a GPU has room for: each takes milliseconds.

    Experts are sorted in chunks from fewer pairs on.
    """
    from remora.kernels.gpu import moe_align
    from remora.kernels.gpu.attention import mla

    launch_few_programs(patch)
    few = mla.LatentLaunch(queries=32, keys=32, num_warps=4, num_stages=2, programs=4)
    patch.setattr(mla, "launch_of", lambda *shape: few)
    patch.setattr(moe_align, "MAX_FEW", 64)
    patch.setattr(moe_align, "CHUNK", 64)
