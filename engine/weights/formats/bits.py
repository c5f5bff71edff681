"""Packs integers into words of 32 bits, and unpacks integers of 1 to 8 bits from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WORD_BITS = 32
AT_ONCE = 1 << 20  # integers that are unpacked at a time, by numbers of 64 bits
Unpack = Callable[[Tensor, int, int], Tensor]


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack integers [..., count] into words [..., W] int32, each from its lowest bit on.

    bits:  a divisor of 32
    """
    each = WORD_BITS // bits
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % each))
    lanes = padded.reshape(*padded.shape[:-1], -1, each)
    words = torch.zeros(lanes.shape[:-1], dtype=torch.int64)
    for place in range(each):
        words |= lanes[..., place].long() << place * bits
    return words.to(torch.uint32).view(torch.int32)


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack a stream of integers, each from its lowest bit on; integers may cross words.

    words:  [..., W] int32
    count:  integers in a row
    Returns [..., count] uint8. Raises ValueError if the words are none or too few.
    """
    _check_words(words)
    if words.shape[-1] * WORD_BITS < count * bits:
        raise ValueError(f"{words.shape[-1]} words do not hold {count} numbers of {bits} bits")
    return _by_rows(_from_stream, words, bits, count)


def _from_stream(words: Tensor, bits: int, count: int) -> Tensor:
    octets = words.contiguous().view(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -octets.shape[-1] % bits))
    lanes = octets.reshape(*octets.shape[:-1], -1, bits)  # eight integers in `bits` bytes
    joined = torch.zeros(lanes.shape[:-1], dtype=torch.int64)
    for place in range(bits):
        joined |= lanes[..., place].long() << 8 * place
    values = torch.empty(*joined.shape, 8, dtype=torch.uint8)
    for place in range(8):
        values[..., place] = joined >> bits * place & (1 << bits) - 1
    return values.flatten(-2)[..., :count]


def unpack_spread(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack words that hold whole integers only; the highest bits of a word may be unused."""
    _check_words(words)
    each = WORD_BITS // bits
    if words.shape[-1] * each < count:
        raise ValueError(f"{words.shape[-1]} words do not hold {count} numbers of {bits} bits")
    return _by_rows(_from_whole, words, bits, count)


def _from_whole(words: Tensor, bits: int, count: int) -> Tensor:
    each = WORD_BITS // bits
    shifts = torch.arange(0, each * bits, bits, dtype=torch.int32)
    values = words[..., None] >> shifts & (1 << bits) - 1
    return values.to(torch.uint8).flatten(-2)[..., :count]


def _check_words(words: Tensor) -> None:
    if words.dtype != torch.int32:
        raise ValueError(f"words are {str(words.dtype).removeprefix('torch.')}; expected int32")


def _by_rows(unpack: Unpack, words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack some rows at a time, so that only results are as large as a weight."""
    rows = words.reshape(-1, words.shape[-1])
    values = torch.empty(len(rows), count, dtype=torch.uint8)
    step = max(1, AT_ONCE // max(count, 1))
    for first in range(0, len(rows), step):
        values[first : first + step] = unpack(rows[first : first + step], bits, count)
    return values.view(*words.shape[:-1], count)


def add_to_each(words: Tensor, bits: int) -> Tensor:
    """Add 1 to every integer of words, as one sum of 32 bits: carries go to the next integer.

    bits:  a divisor of 32
    """
    ones = sum(1 << shift for shift in range(0, WORD_BITS, bits))
    return ((words.long() + ones) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
