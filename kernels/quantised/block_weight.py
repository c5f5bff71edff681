"""Weights in blocks of GGUF as stored, split into codes and scales.

Each type of block has an entry in `BLOCK_TYPES`: its sizes, and how its bytes are divided. A weight
is (code - zero) * scale - least, or table[code] * scale; scales and leasts belong to groups of
inputs and are numbers of the whole block, multiplied with levels of 8 bits where the type has
them. Knows no files and no layout of a kernel.

Legend: R rows, I inputs, B blocks, G groups, of a row or (in `_split` functions) of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.quantised.weight_kinds import WeightKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Blocks split into numbers.

    codes:    [R, I] uint8
    numbers:  the scale of each block, then its least if the type has one; [R, B] float16
    levels:   their factors for each group, or none; [R, G] uint8 or int8
    """

    codes: Tensor
    numbers: tuple[Tensor, ...]
    levels: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks.

    size:       inputs of a block
    num_bytes:  of a block
    group:      inputs of a group
    bits:       of a code
    zero:       the code that stands for 0, before a least is taken off; 0 with a table
    split:      divides blocks [B, bytes] as if each was a row
    table:      what codes stand for, if it is not their difference from `zero`
    starts:     bytes of a block where its float16 numbers begin
    """

    size: int
    num_bytes: int
    group: int
    bits: int
    zero: int
    split: Callable[[Tensor], BlockParts]
    table: tuple[int, ...] = ()
    starts: tuple[int, ...] = (0,)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, before they are multiplied, in float32."""
        if self.table:
            return torch.tensor(self.table, dtype=torch.float32)[codes.int()]
        return codes.float() - self.zero


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight(WeightKind):
    """Blocks as stored.

    blocks:  [O, bytes of a row] uint8
    type:    GGML's name of the type, one of `BLOCK_TYPES`
    size:    O and I
    """

    blocks: Tensor
    type: str
    size: tuple[int, int]

    def __post_init__(self) -> None:
        """Raise ValueError unless the bytes are those of the size."""
        if self.type not in BLOCK_TYPES:
            known = ", ".join(BLOCK_TYPES)
            raise ValueError(f"{self.type} blocks are not computed with; known are {known}")
        type, (outputs, inputs) = BLOCK_TYPES[self.type], self.size
        shape = (outputs, inputs // type.size * type.num_bytes)
        if inputs % type.size or self.blocks.shape != shape or self.blocks.dtype != torch.uint8:
            raise ValueError(
                f"{self.blocks.dtype} {list(self.blocks.shape)} are not {self.type} blocks "
                f"of a weight {list(self.size)}"
            )

    def check_scales(self) -> None:
        """Raise ValueError if a block's scale or least is infinite or not a number."""
        type = BLOCK_TYPES[self.type]
        blocks = self.blocks.view(-1, type.num_bytes)
        for start in type.starts:
            # All bits of the exponent, which are in the upper byte.
            if (blocks[:, start + 1] & 0x7C == 0x7C).any():
                raise ValueError("a scale is infinite or not a number")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [O, I]."""
        return self.size

    def select(self, rows: Tensor) -> BlockWeight:
        """Return the weight of these rows, in this order."""
        return BlockWeight(blocks=self.blocks[rows], type=self.type, size=(len(rows), self.size[1]))

    def joined(self, others: Sequence[BlockWeight]) -> BlockWeight | None:
        """Join weights in blocks of the same type."""
        every = (self, *others)
        if any(one.type != self.type for one in others):
            return None
        return BlockWeight(
            blocks=torch.cat([one.blocks for one in every]),
            type=self.type,
            size=(sum(one.size[0] for one in every), self.size[1]),
        )

    def split(self) -> BlockParts:
        """Return codes and scales of all rows."""
        type, outputs = BLOCK_TYPES[self.type], self.size[0]
        parts = type.split(self.blocks.reshape(-1, type.num_bytes))
        return BlockParts(
            codes=parts.codes.view(self.size),
            numbers=tuple(number.view(outputs, -1) for number in parts.numbers),
            levels=tuple(level.reshape(outputs, -1) for level in parts.levels),
        )

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        type, parts = BLOCK_TYPES[self.type], self.select(torch.arange(first, last)).split()
        per_group = [
            number.float().repeat_interleave(type.size // type.group, 1) for number in parts.numbers
        ]
        for number, level in zip(per_group, parts.levels, strict=False):
            number *= level.float()
        groups = type.numbers(parts.codes).view(last - first, -1, type.group)
        values = groups * per_group[0][..., None]
        if len(per_group) > 1:
            values -= per_group[1][..., None]
        return values.flatten(1)


def _float16(blocks: Tensor, start: int) -> Tensor:
    """Return the number [B] at a byte of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).flatten()


def _digits(values: Tensor, bits: int) -> Tensor:
    """Cut bytes [B, ..., n] into digits [B, ..., 8 / bits, n], the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return values[..., None, :] >> shifts & (1 << bits) - 1


def _levels_of_six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 leasts in the 12 bytes [B, 12] of Q4_K and Q5_K."""
    scales, leasts, rest = packed.view(-1, 3, 4).unbind(1)
    upper = (rest & 15 | scales >> 6 << 4, rest >> 4 | leasts >> 6 << 4)
    return torch.cat((scales & 63, upper[0]), dim=1), torch.cat((leasts & 63, upper[1]), dim=1)


def _split_q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(codes=_digits(blocks[:, 2:], 4).flatten(1), numbers=(_float16(blocks, 0),))


def _split_q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(
        codes=_digits(blocks[:, 4:], 4).flatten(1),
        numbers=(_float16(blocks, 0), -_float16(blocks, 2)),
    )


def _with_fifth_bits(nibbles: Tensor, packed: Tensor) -> Tensor:
    """Join nibbles [B, 16] and bits [B, 4], those of a byte belonging to neighbours."""
    fifth = _digits(packed[..., None], 1).flatten(1)
    return _digits(nibbles, 4).flatten(1) | fifth << 4


def _split_q5_0(blocks: Tensor) -> BlockParts:
    return BlockParts(
        codes=_with_fifth_bits(blocks[:, 6:], blocks[:, 2:6]), numbers=(_float16(blocks, 0),)
    )


def _split_q5_1(blocks: Tensor) -> BlockParts:
    return BlockParts(
        codes=_with_fifth_bits(blocks[:, 8:], blocks[:, 4:8]),
        numbers=(_float16(blocks, 0), -_float16(blocks, 2)),
    )


def _split_q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(codes=blocks[:, 2:] ^ 128, numbers=(_float16(blocks, 0),))


def _split_q2_k(blocks: Tensor) -> BlockParts:
    levels = blocks[:, :16]
    return BlockParts(
        codes=_digits(blocks[:, 16:80].view(-1, 2, 32), 2).flatten(1),
        numbers=(_float16(blocks, 80), _float16(blocks, 82)),
        levels=(levels & 15, levels >> 4),
    )


def _split_q3_k(blocks: Tensor) -> BlockParts:
    lower = _digits(blocks[:, 32:96].view(-1, 2, 32), 2).view(-1, 8, 32)
    third = _digits(blocks[:, :32], 1)
    levels = (
        _digits(blocks[:, 96:104], 4).flatten(1) | _digits(blocks[:, 104:108], 2).flatten(1) << 4
    )
    return BlockParts(
        codes=(lower | third << 2).flatten(1),
        numbers=(_float16(blocks, 108),),
        levels=(levels.view(torch.int8) - 32,),
    )


def _split_q4_k(blocks: Tensor) -> BlockParts:
    nibbles = _digits(blocks[:, 16:].view(-1, 4, 32), 4)
    return BlockParts(
        codes=nibbles.flatten(1),
        numbers=(_float16(blocks, 0), _float16(blocks, 2)),
        levels=_levels_of_six_bits(blocks[:, 4:16].contiguous()),
    )


def _split_q5_k(blocks: Tensor) -> BlockParts:
    nibbles = _digits(blocks[:, 48:].view(-1, 4, 32), 4).view(-1, 8, 32)
    fifth = _digits(blocks[:, 16:48], 1)
    return BlockParts(
        codes=(nibbles | fifth << 4).flatten(1),
        numbers=(_float16(blocks, 0), _float16(blocks, 2)),
        levels=_levels_of_six_bits(blocks[:, 4:16].contiguous()),
    )


def _split_q6_k(blocks: Tensor) -> BlockParts:
    nibbles = _digits(blocks[:, :128].view(-1, 2, 64), 4).view(-1, 2, 4, 32)
    upper = _digits(blocks[:, 128:192].view(-1, 2, 32), 2)
    return BlockParts(
        codes=(nibbles | upper << 4).flatten(1),
        numbers=(_float16(blocks, 208),),
        levels=(blocks[:, 192:208].contiguous().view(torch.int8),),
    )


def _split_iq4_xs(blocks: Tensor) -> BlockParts:
    upper = _digits(blocks[:, 2:4, None], 2).flatten(1)
    lower = _digits(blocks[:, 4:8, None], 4).flatten(1)
    return BlockParts(
        codes=_digits(blocks[:, 8:].view(-1, 8, 16), 4).flatten(1),
        numbers=(_float16(blocks, 0),),
        levels=((lower | upper << 4).view(torch.int8) - 32,),
    )


IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, 32, 4, 8, _split_q4_0),
    "Q4_1": BlockType(32, 20, 32, 4, 0, _split_q4_1, starts=(0, 2)),
    "Q5_0": BlockType(32, 22, 32, 5, 16, _split_q5_0),
    "Q5_1": BlockType(32, 24, 32, 5, 0, _split_q5_1, starts=(0, 2)),
    "Q8_0": BlockType(32, 34, 32, 8, 128, _split_q8_0),
    "Q2_K": BlockType(256, 84, 16, 2, 0, _split_q2_k, starts=(80, 82)),
    "Q3_K": BlockType(256, 110, 16, 3, 4, _split_q3_k, starts=(108,)),
    "Q4_K": BlockType(256, 144, 32, 4, 0, _split_q4_k, starts=(0, 2)),
    "Q5_K": BlockType(256, 176, 32, 5, 0, _split_q5_k, starts=(0, 2)),
    "Q6_K": BlockType(256, 210, 16, 6, 32, _split_q6_k, starts=(208,)),
    "IQ4_NL": BlockType(32, 18, 32, 4, 0, _split_q4_0, IQ4_LEVELS),
    "IQ4_XS": BlockType(256, 136, 32, 4, 0, _split_iq4_xs, IQ4_LEVELS),
}
