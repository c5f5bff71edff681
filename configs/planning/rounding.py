"""Formats to which `model.quantization` rounds weights on a CPU, part by part: the only rule.

Parts that lose the most get the most bits. Plans count the bytes, and engines pack the weights, by
this rule. Knows the names of parts and the bits of formats; `kernels/cpu/src/linear.h` has the
layouts, and docs/quantization.md what they cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.sections.model import ModelSection

RoundedFormat = Literal["int8", "int5", "int4"]
HeldFormat = RoundedFormat | Literal["none"]
_ONE_PRODUCT = {"gate_proj", "up_proj"}
# Inputs that share a scale, and in int5 and int4 a minimum; both have 16 bits.
GROUP = 32
# The same of int8 where there are tile registers, which hold 64 inputs. Whether the system lets
# programs use them is not known here.
TILE_GROUP = 64
_TILE_FEATURES = frozenset(("amx_tile", "amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Another format for some parts of some layers; layers None = all."""

    parts: frozenset[str]
    layers: frozenset[int] | None
    format: HeldFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The formats of a model's weights; none = the model's own number format.

    usual:      of all parts that are not in `parts`
    parts:      by the last parts of the weights' names in the model
    head:       of the output head
    overrides:  exceptions from these, the last that matches
    int8_group: inputs that share a scale in int8
    """

    usual: HeldFormat
    parts: Mapping[str, RoundedFormat] = field(default_factory=dict)
    head: HeldFormat = "int8"
    overrides: tuple[Override, ...] = ()
    int8_group: int = GROUP

    def format_of(self, part: str, layer: int) -> HeldFormat:
        """Return the format of a part of a layer."""
        for each in reversed(self.overrides):
            if part in each.parts and (each.layers is None or layer in each.layers):
                return each.format
        return self.parts.get(part, self.usual)

    def group_of(self, format: RoundedFormat) -> int:
        """Return the number of inputs that share a scale."""
        return self.int8_group if format == "int8" else GROUP

    def bits_of(self, format: HeldFormat, *, plain: float = 16.0) -> float:
        """Return the bits of a weight, scales and minima included; `plain`: if not rounded."""
        match format:
            case "none":
                return plain
            case "int8":
                return 8 + 16 / self.int8_group
            case "int5" | "int4":
                return int(format.removeprefix("int")) + 32 / GROUP

    def bits(
        self, numbers: Mapping[str, int], *, num_layers: int = 1, plain: float = 16.0
    ) -> float:
        """Return the average bits of a layer's weight.

        numbers:  of the weights of each part, in all layers
        plain:    bits of a weight that is not rounded
        """
        total = sum(numbers.values())
        if total == 0:
            return self.bits_of(self.usual, plain=plain)
        return sum(
            self.bits_of(self.format_of(part, layer), plain=plain) * each
            for part, each in numbers.items()
            for layer in range(num_layers)
        ) / (total * num_layers)

    @property
    def groups(self) -> set[int]:
        """The sizes of the groups of the layers' parts."""
        used = {self.usual, *self.parts.values(), *(each.format for each in self.overrides)}
        return {self.group_of(format) for format in used if format != "none"}

    @property
    def has_plain(self) -> bool:
        """Whether some parts of layers are not rounded."""
        return "none" in {self.usual, *(each.format for each in self.overrides)}

    def describe(
        self, numbers: Mapping[str, int], *, num_layers: int = 1, plain: float = 16.0
    ) -> str:
        """Return the formats of the layers in words, with the average bits of a weight."""
        others = [f"{part} {format}" for part, format in self.parts.items() if part in numbers]
        for each in self.overrides:
            of_layers = "" if each.layers is None else f" of {len(each.layers)} layers"
            others.append(f"{', '.join(sorted(each.parts))}{of_layers} {each.format}")
        named = f" ({', '.join(others)})" if others else ""
        bits = self.bits(numbers, num_layers=num_layers, plain=plain)
        return f"{self.usual}{named}, {bits:.2f} bits a weight"


# Queries and keys only choose where attention looks; values are averaged, and lose the most.
ROUNDINGS: Mapping[str, Rounding] = {
    "int8": Rounding(usual="int8"),
    "int4": Rounding(usual="int5", parts={"q_proj": "int4", "k_proj": "int4", "v_proj": "int8"}),
    "int4_pure": Rounding(usual="int4"),
}


# Perplexity that a small model lost whose weights were not made for 4 bits (docs/quantization.md);
# of int8 the medians of three texts.
_LOSSES: Mapping[str, str] = {"int8": "0.6 %", "int4": "5 %", "int4_pure": "23 %"}
_INT8_TILE_LOSS = "1.2 %"  # where more inputs share a scale


def loss_of(quantization: str, rounding: Rounding | None) -> str:
    """Return the perplexity that `model.quantization` cost a small model; empty = unknown.

    rounding:  on a CPU; that of GPUs, and overrides, have not been measured
    """
    if rounding is None or rounding.overrides:
        return ""
    if quantization == "int8" and rounding.int8_group == TILE_GROUP:
        return _INT8_TILE_LOSS
    return _LOSSES.get(quantization, "")


def asked_rounding(section: ModelSection) -> str:
    """Return the written key that rounds weights, with its value; empty = none does."""
    if section.quantization != "none":
        return f"model.quantization = {section.quantization}"
    return "model.quantization_overrides" if section.quantization_overrides else ""


def plan_rounding(
    section: ModelSection, model: ModelFacts, device: str, cpu_features: Collection[str]
) -> Rounding | None:
    """Return the formats to which weights are rounded on a CPU; None = they are not.

    cpu_features:  as in `MachineFacts`

    Raises ConfigError for overrides that the model or the device cannot have.
    """
    usual = ROUNDINGS.get(section.quantization)
    if not section.quantization_overrides and (usual is None or device != "cpu"):
        return None
    if device != "cpu":
        raise ConfigError(
            f"model.quantization_overrides: needs a CPU, and the model runs on {device}; leave it "
            "out, or serve a checkpoint whose layers have these formats"
        )
    overrides = []
    for number, each in enumerate(section.quantization_overrides):
        key = f"model.quantization_overrides[{number}]"
        _check_known(f"{key}.parts", each.parts, model.linear_weights)
        _check_known(f"{key}.layers", each.layers or (), range(model.num_layers))
        if len(_ONE_PRODUCT.intersection(each.parts)) == 1:
            raise ConfigError(f"{key}.parts: gate_proj and up_proj are one product; name both")
        layers = None if each.layers is None else frozenset(each.layers)
        overrides.append(Override(parts=frozenset(each.parts), layers=layers, format=each.format))
    return replace(
        usual or Rounding(usual="none", head="none"),
        overrides=tuple(overrides),
        int8_group=TILE_GROUP if _TILE_FEATURES.issubset(cpu_features) else GROUP,
    )


def _check_known(key: str, found: Iterable[object], known: Collection[object]) -> None:
    foreign = [each for each in found if each not in known]
    if foreign:
        offered = (
            f"0 to {len(known) - 1}" if isinstance(known, range) else ", ".join(map(str, known))
        )
        raise ConfigError(f"{key}: the model has no {foreign[0]}; it has {offered}")


def describe_rounding(
    rounding: Rounding | None, quantization: str, model: ModelFacts, *, plain: float
) -> str:
    """Return what is rounded, in words; empty = nothing.

    rounding:  on a CPU
    plain:     bits of a weight that is not rounded
    """
    if rounding is not None:
        numbers = model.linear_weights
        return rounding.describe(numbers, num_layers=model.num_layers, plain=plain)
    return "" if quantization == "none" else quantization
