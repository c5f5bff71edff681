"""Formats to which `model.quantization` rounds weights on a CPU, part by part: the only rule.

Parts that lose the most in 4 bits stay in 8. Plans count the bytes, and engines pack the weights,
by this rule. Knows the names of parts and the bits of formats; `kernels/cpu/src/linear.h` describes
the layouts, and docs/quantization.md what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RoundedFormat = Literal["int8", "int4"]
GROUPS: Mapping[RoundedFormat, int] = {"int8": 64, "int4": 32}  # inputs that share a scale
# Of a weight, with its share of a bfloat16 scale, and of a minimum in int4.
BITS: Mapping[RoundedFormat, float] = {
    "int8": 8 + 16 / GROUPS["int8"],
    "int4": 4 + 32 / GROUPS["int4"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The formats of a model's weights.

    usual:    of all parts that are not in `in_int8`
    in_int8:  last parts of the weights' names in the model
    head:     of the output head
    """

    usual: RoundedFormat
    in_int8: tuple[str, ...] = ()
    head: RoundedFormat = "int8"

    def format_of(self, part: str) -> RoundedFormat:
        """Return the format of a part."""
        return "int8" if part in self.in_int8 else self.usual

    def bits(self, numbers: Mapping[str, int]) -> float:
        """Return the average bits of a weight; `numbers`: of the weights of each part."""
        total = sum(numbers.values())
        if total == 0:
            return BITS[self.usual]
        return sum(BITS[self.format_of(part)] * each for part, each in numbers.items()) / total

    @property
    def of_layers(self) -> set[RoundedFormat]:
        """The formats of the layers' parts."""
        return {self.usual, *map(self.format_of, self.in_int8)}

    def describe(self, numbers: Mapping[str, int]) -> str:
        """Return the formats of the layers in words, with the average bits of a weight."""
        others = [part for part in self.in_int8 if part in numbers]
        named = f" with {' and '.join(others)} in int8" if others else ""
        return f"{self.usual}{named}, {self.bits(numbers):.2f} bits a weight"


ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(usual="int8"),
    "int4": Rounding(usual="int4", in_int8=("v_proj", "down_proj")),
    "int4_pure": Rounding(usual="int4"),
}


def describe_rounding(quantization: str, numbers: Mapping[str, int], device: str) -> str:
    """Return what a value of `model.quantization` does, in words; empty = nothing.

    numbers:  of the weights of each part
    """
    if device == "cpu" and quantization in ROUNDINGS:
        return ROUNDINGS[quantization].describe(numbers)
    return "" if quantization == "none" else quantization
