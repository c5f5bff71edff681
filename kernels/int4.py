"""How four bits of a weight lie in the words of others' checkpoints, and how we pack them.

GPTQ (arXiv:2210.17323) has eight inputs of an output in a word, AWQ (arXiv:2306.00978) eight
outputs of an input, in an order of its own. Both have groups of inputs with a scale and a zero
point for each output. Done once when a checkpoint is loaded, in torch.

Legend: I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.kernels.quant_formats import MAX_HALF, Int4Weight

NIBBLES = 8  # of a word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble of a word, from its lowest bits on


def pack_int4(values: Tensor, scales: Tensor, zeros: Tensor, *, group_size: int) -> Int4Weight:
    """Pack a weight for `linear_quant`.

    values:      [O, I] uint8, below 16
    scales:      [G, O]
    zeros:       [G, O] whole numbers, 0 to 16 (GPTQ's may be 16)
    group_size:  32, 64 or a multiple of 128; the last group may be smaller

    Raises ValueError where there is no such group size, or too few groups.
    """
    if group_size not in (MAX_HALF // 2, MAX_HALF) and group_size % (2 * MAX_HALF) != 0:
        raise ValueError(f"groups of {group_size} inputs; there are those of 32, 64 and 128 * n")
    outputs, inputs = values.shape
    groups = -(-inputs // group_size)
    if scales.shape != (groups, outputs) or zeros.shape != scales.shape:
        raise ValueError(f"scales {list(scales.shape)} are not those of {groups} x {outputs}")
    half = min(MAX_HALF, group_size)
    padded = torch.nn.functional.pad(values, (0, -inputs % (2 * half)))
    low, high = padded.view(outputs, -1, 2, half).unbind(2)
    return Int4Weight(
        values=(low | high << 4).flatten(1).contiguous(),
        scales=scales.contiguous(),
        zeros=zeros.to(torch.uint8).contiguous(),
        inputs=inputs,
        group_size=group_size,
    )


def from_gptq(
    words: Tensor, zeros: Tensor, scales: Tensor, *, group_size: int, is_zero_less_one: bool = True
) -> Int4Weight:
    """Take over a GPTQ weight whose inputs are in order (no `desc_act`).

    words:   [I / 8, O] int32, the input of the lowest bits first
    zeros:   [G, O / 8] int32, the output of the lowest bits first
    scales:  [G, O]
    is_zero_less_one: whether zero points are stored less one, as the first format (`gptq`) does and
                      the second (`gptq_v2`) does not
    """
    values = _nibbles(words).movedim(2, 1).flatten(0, 1).T
    points = _nibbles(zeros).flatten(1) + int(is_zero_less_one)
    return pack_int4(values, scales, points, group_size=group_size)


def from_awq(words: Tensor, zeros: Tensor, scales: Tensor, *, group_size: int) -> Int4Weight:
    """Take over an AWQ weight.

    words:   [I, O / 8] int32, outputs in AWQ_ORDER
    zeros:   [G, O / 8] int32, likewise
    scales:  [G, O]
    """
    values = _in_order(_nibbles(words)).flatten(1).T
    return pack_int4(values, scales, _in_order(_nibbles(zeros)).flatten(1), group_size=group_size)


def _nibbles(words: Tensor) -> Tensor:
    """Return [..., 8] uint8, those of the lowest bits first."""
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8)


def _in_order(nibbles: Tensor) -> Tensor:
    """Return AWQ's nibbles [..., 8] in the order of outputs."""
    place = torch.tensor(AWQ_ORDER, device=nibbles.device).argsort()
    return nibbles[..., place]
