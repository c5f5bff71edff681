"""Rotary position embedding: cosines and sines of each position.

A token's angles depend on its position only, never on the length of its sequence or on the batch,
so that cached K stays valid for every later step and every sequence that shares it. This defines
the `dynamic` type, whose frequencies depend on the sequence's length: here the length at a token is
its position + 1. transformers computes the same angles when it decodes token by token; when it
prefills more than `original_max_position` tokens at once, it uses the last token's frequencies for
all of them, which a cache cannot follow. The same holds for `longrope`, whose frequencies change
beyond that length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remora.engine.models.rope_config import RopeConfig


class RotaryEmbedding:
    """Cosines and sines for a rope configuration.

    inverse_frequencies:  [P] float32, of the P pairs of a head that are turned
    scale:                factor on cosines and sines (YaRN's attention factor)
    """

    def __init__(self, config: RopeConfig, head_dim: int, *, device: str) -> None:
        self.config = config
        dim = config.rotary_dim or head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self._exponents = exponents.to(device)
        self.inverse_frequencies = _inverse_frequencies(config, exponents).to(device)
        self.scale = config.attention_factor
        self._long_frequencies: Tensor | None = None
        self._table: Tensor | None = None
        if config.kind == "longrope":
            divisors = torch.tensor(config.long_divisors)
            self._long_frequencies = (1.0 / (divisors * config.theta**exponents)).to(device)

    def tabulate(self, num_positions: int, dtype: torch.dtype) -> None:
        """Compute all positions' angles once, for `angles` of the same dtype to look up.

        A GPU launches one kernel for a lookup, and about ten for a computation.
        """
        positions = torch.arange(num_positions, device=self.inverse_frequencies.device)
        self._table = torch.cat(self._computed(positions, dtype), dim=1)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [num_tokens, P], each row contiguous, of positions [num_tokens].

        positions:  below those of `tabulate`, if it was called
        """
        if self._table is None or self._table.dtype != dtype:
            return self._computed(positions, dtype)
        cos, sin = self._table.index_select(0, positions).chunk(2, dim=1)
        return cos, sin

    def _computed(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        at = positions.float().unsqueeze(1)
        frequencies = self.inverse_frequencies
        if self.config.kind == "dynamic":
            frequencies = self._dynamic_frequencies(at)
        elif self._long_frequencies is not None:
            is_short = at < self.config.original_max_position
            frequencies = torch.where(is_short, frequencies, self._long_frequencies)
        angles = at * frequencies
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def _dynamic_frequencies(self, at: Tensor) -> Tensor:
        """Stretch the base for tokens past the original length. [num_tokens, P]."""
        factor, original = self.config.factor, self.config.original_max_position
        dim = 2 * len(self._exponents)
        length = (at + 1).clamp(min=original)
        stretch = (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / (self.config.theta * stretch) ** self._exponents


def _inverse_frequencies(config: RopeConfig, exponents: Tensor) -> Tensor:
    plain = 1.0 / config.theta**exponents
    match config.kind:
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(config, plain)
        case "yarn":
            return _yarn(config, plain)
        case "divided":
            return plain / torch.tensor(config.divisors)
        case "longrope":
            return 1.0 / (torch.tensor(config.divisors) * config.theta**exponents)
        case "none":
            return torch.zeros_like(plain)
        case _:
            return plain


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, blend those between."""
    turns = config.original_max_position * plain / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / config.factor)


def _yarn(config: RopeConfig, plain: Tensor) -> Tensor:
    """Keep the first dimensions, divide the last by the factor, a linear ramp between.

    The ramp runs between the dimensions that make `beta_fast` and `beta_slow` turns over the
    original length.
    """
    num_pairs = len(plain)

    def dimension(turns: float) -> float:
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(config.theta)

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001
    divide = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - divide) + plain / config.factor * divide
