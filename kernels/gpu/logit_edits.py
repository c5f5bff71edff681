"""Triton kernels that edit logits in place: `add_at`, `penalize` and `mask_tokens`.

`kernels/sampling.py` and `kernels/grammar_mask.py` specify them. Entries with a row below 0 are
skipped, so that a captured launch can have the largest number of entries of any step. The number
of entries is not specialised: compilation would take a second.

Legend, and suffixes of blocks: R rows, V vocabulary, N entries, G restricted rows; E entries or
tokens of a program, W words of a program.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ENTRIES, WORDS = 256, 64  # of a program
OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}


def add_at(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values to single logits.

    logits:  [R, V] float32, each row contiguous
    others:  [N] int64, int64, float32
    """
    assert logits.stride(1) == 1
    if len(rows) > 0:
        add_at_kernel[(triton.cdiv(len(rows), ENTRIES),)](
            logits, rows, ids, values, len(rows), logits.stride(0), E=ENTRIES, **OPTIONS
        )


def penalize(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise occurred tokens.

    logits:             [R, V] float32, each row contiguous
    rows, ids:          [N] int64
    counts, penalties:  [N] float32
    """
    assert logits.stride(1) == 1
    if len(rows) > 0:
        penalize_kernel[(triton.cdiv(len(rows), ENTRIES),)](
            logits,
            rows,
            ids,
            counts,
            repetition,
            presence,
            frequency,
            len(rows),
            logits.stride(0),
            E=ENTRIES,
            **OPTIONS,
        )


def mask_tokens(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """Set disallowed logits to -inf.

    logits:  [R, V] float32, each row contiguous
    lines:   [G] int64
    words:   [G, ceil(V / 32)] int32, each row contiguous
    """
    vocab_size = logits.shape[1]
    assert logits.stride(1) == words.stride(1) == 1
    if len(lines) > 0:
        mask_kernel[(len(lines), triton.cdiv(words.shape[1], WORDS))](
            logits,
            lines,
            words,
            vocab_size,
            logits.stride(0),
            words.stride(0),
            W=WORDS,
            **OPTIONS,
        )


@triton.jit(
    do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["rows", "ids", "values"]
)
def add_at_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    num_entries: int,
    stride: int,
    E: tl.constexpr,
) -> None:
    """Program (E entries)."""
    entry_E = tl.program_id(0) * E + tl.arange(0, E)
    row_E = tl.load(rows + entry_E, mask=entry_E < num_entries, other=-1)
    is_used_E = row_E >= 0
    at_E = logits + row_E * stride + tl.load(ids + entry_E, mask=is_used_E, other=0)
    value_E = tl.load(values + entry_E, mask=is_used_E, other=0.0)
    tl.store(at_E, tl.load(at_E, mask=is_used_E, other=0.0) + value_E, mask=is_used_E)


@triton.jit(
    do_not_specialize=["num_entries"],
    do_not_specialize_on_alignment=["rows", "ids", "counts", "repetition", "presence", "frequency"],
)
def penalize_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    num_entries: int,
    stride: int,
    E: tl.constexpr,
) -> None:
    """Program (E entries)."""
    entry_E = tl.program_id(0) * E + tl.arange(0, E)
    row_E = tl.load(rows + entry_E, mask=entry_E < num_entries, other=-1)
    is_used_E = row_E >= 0
    at_E = logits + row_E * stride + tl.load(ids + entry_E, mask=is_used_E, other=0)
    x_E = tl.load(at_E, mask=is_used_E, other=0.0)
    factor_E = tl.load(repetition + entry_E, mask=is_used_E, other=1.0)
    count_E = tl.load(counts + entry_E, mask=is_used_E, other=0)
    once_E = tl.load(presence + entry_E, mask=is_used_E, other=0.0)
    each_E = tl.load(frequency + entry_E, mask=is_used_E, other=0.0)
    x_E = tl.where(x_E > 0, tl.div_rn(x_E, factor_E), x_E * factor_E)
    x_E -= tl.where(count_E > 0, once_E, 0.0)
    tl.store(at_E, x_E - each_E * count_E.to(tl.float32), mask=is_used_E)


@triton.jit(do_not_specialize_on_alignment=["lines"])
def mask_kernel(
    logits: tl.tensor,
    lines: tl.tensor,
    words: tl.tensor,
    vocab_size: int,
    stride: int,
    words_stride: int,
    W: tl.constexpr,
) -> None:
    """Program (restricted row, W words)."""
    place = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + place)
    if line >= 0:
        token_E = tl.program_id(1) * (W * 32) + tl.arange(0, W * 32)
        is_token_E = token_E < vocab_size
        # Neighbouring threads read the same word from the cache.
        word_E = tl.load(words + place * words_stride + token_E // 32, mask=is_token_E, other=-1)
        is_banned_E = (word_E >> token_E % 32 & 1) == 0
        at_E = logits + line * stride + token_E
        # Allowed logits are neither read nor written.
        x_E = tl.load(at_E, mask=is_banned_E & is_token_E, other=0.0)
        tl.store(at_E, x_E + float("-inf"), mask=is_banned_E & is_token_E)
