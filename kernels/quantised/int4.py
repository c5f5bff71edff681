"""Conversion of int4 weights from GPTQ and AWQ checkpoints to `Int4Weight`, in torch.

A word holds eight inputs of an output in GPTQ (arXiv:2210.17323), and eight outputs of an input in
a permuted order in AWQ (arXiv:2306.00978). Both have groups of inputs with a scale and a zero point
for each output. Runs once when a checkpoint is loaded.

Legend: I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.quantised.quant_formats import MAX_HALF, Int4Weight, in_runs

NIBBLES = 8  # per word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, from its lowest bits on


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor, *, group_size: int) -> Int4Weight:
    """Pack a weight for `linear_quant`.

    values:      [O, I] uint8, below 16
    scales:      [G, O]
    zeros:       [G, O] whole numbers, 0 to 16
    group_size:  32, 64 or a multiple of 128; the last group may be smaller

    Raises ValueError for an unsupported group size or a wrong number of groups.
    """
    if group_size not in (MAX_HALF // 2, MAX_HALF) and group_size % (2 * MAX_HALF) != 0:
        raise ValueError(
            f"groups of {group_size} inputs; supported are 32, 64 and multiples of 128"
        )
    outputs, inputs = values.shape
    groups = -(-inputs // group_size)
    if scales.shape != (groups, outputs) or zeros.shape != scales.shape:
        raise ValueError(f"scales are {list(scales.shape)}; expected [{groups}, {outputs}]")
    return Int4Weight(
        values=in_runs(values, min(MAX_HALF, group_size)),
        scales=scales.contiguous(),
        zeros=zeros.to(torch.uint8).contiguous(),
        inputs=inputs,
        group_size=group_size,
    )


def from_gptq(
    words: Tensor, zeros: Tensor, scales: Tensor, *, group_size: int, is_zero_less_one: bool = True
) -> Int4Weight:
    """Convert a GPTQ weight whose inputs are in order (no `desc_act`).

    words:   [I / 8, O] int32, the input of the lowest bits first
    zeros:   [G, O / 8] int32, the output of the lowest bits first
    scales:  [G, O]
    is_zero_less_one: zero points are stored minus one, as in `gptq` but not in `gptq_v2`: one was
        subtracted from the eight zeros of a word at once, so that a zero of 0 borrows from the next
    """
    values = _nibbles(words).movedim(2, 1).flatten(0, 1).T
    points = _nibbles(_plus_one(zeros) if is_zero_less_one else zeros).flatten(1)
    return pack_int4(values, scales, points, group_size=group_size)


def from_awq(words: Tensor, zeros: Tensor, scales: Tensor, *, group_size: int) -> Int4Weight:
    """Convert an AWQ weight.

    words:   [I, O / 8] int32, outputs in AWQ_ORDER
    zeros:   [G, O / 8] int32, likewise
    scales:  [G, O]
    """
    values = _in_order(_nibbles(words)).flatten(1).T
    return pack_int4(values, scales, _in_order(_nibbles(zeros)).flatten(1), group_size=group_size)


def _plus_one(words: Tensor) -> Tensor:
    """Add 1 to the eight digits of each word in one sum, in which digits carry to the next."""
    return ((words.long() + 0x11111111) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def _nibbles(words: Tensor) -> Tensor:
    """Return [..., 8] uint8, lowest bits first."""
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8)


def _in_order(nibbles: Tensor) -> Tensor:
    """Return AWQ's nibbles [..., 8] in the order of outputs."""
    place = torch.tensor(AWQ_ORDER, device=nibbles.device).argsort()
    return nibbles[..., place]
