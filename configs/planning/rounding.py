"""Formats to which `model.quantization` rounds weights on a CPU, part by part: the only rule.

Parts that lose the most get the most bits. Plans count the bytes, and engines pack the weights, by
this rule. Knows the names of parts and the bits of formats; `kernels/cpu/src/linear.h` has the
layouts, and docs/quantization.md what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RoundedFormat = Literal["int8", "int5", "int4"]
# Inputs that share a scale, and in int5 and int4 a minimum; both have 16 bits.
GROUPS: Mapping[RoundedFormat, int] = {"int8": 64, "int5": 32, "int4": 32}
BITS: Mapping[RoundedFormat, float] = {
    "int8": 8 + 16 / GROUPS["int8"],
    "int5": 5 + 32 / GROUPS["int5"],
    "int4": 4 + 32 / GROUPS["int4"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The formats of a model's weights.

    usual:  of all parts that are not in `parts`
    parts:  by the last parts of the weights' names in the model
    head:   of the output head
    """

    usual: RoundedFormat
    parts: Mapping[str, RoundedFormat] = field(default_factory=dict)
    head: RoundedFormat = "int8"

    def format_of(self, part: str) -> RoundedFormat:
        """Return the format of a part."""
        return self.parts.get(part, self.usual)

    def bits(self, numbers: Mapping[str, int]) -> float:
        """Return the average bits of a weight; `numbers`: of the weights of each part."""
        total = sum(numbers.values())
        if total == 0:
            return BITS[self.usual]
        return sum(BITS[self.format_of(part)] * each for part, each in numbers.items()) / total

    @property
    def groups(self) -> set[int]:
        """The sizes of the groups of the layers' parts."""
        return {GROUPS[self.usual], *(GROUPS[format] for format in self.parts.values())}

    def describe(self, numbers: Mapping[str, int]) -> str:
        """Return the formats of the layers in words, with the average bits of a weight."""
        others = [f"{part} {format}" for part, format in self.parts.items() if part in numbers]
        named = f" ({', '.join(others)})" if others else ""
        return f"{self.usual}{named}, {self.bits(numbers):.2f} bits a weight"


# Queries and keys only choose where attention looks; values are averaged, and lose the most.
ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(usual="int8"),
    "int4": Rounding(usual="int5", parts={"q_proj": "int4", "k_proj": "int4", "v_proj": "int8"}),
    "int4_pure": Rounding(usual="int4"),
}


def describe_rounding(quantization: str, numbers: Mapping[str, int], device: str) -> str:
    """Return what a value of `model.quantization` does, in words; empty = nothing.

    numbers:  of the weights of each part
    """
    if device == "cpu" and quantization in ROUNDINGS:
        return ROUNDINGS[quantization].describe(numbers)
    return "" if quantization == "none" else quantization
