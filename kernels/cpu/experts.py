"""Which experts the tokens of a step go through, as step programs note it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.structs import ChoicesStruct
from remora.kernels.memory import buffer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """What was chosen in the latest layer, and the pairs of a token and an expert by expert.

    T tokens, E experts, k of them for each token. Layers one after the other may share it.

    ids:      [T, k] int32, best first
    weights:  [T, k] float32
    tokens:   [T * k] int32, of the sorted pairs
    places:   [T, k] int32, where a pair stands when sorted
    starts:   [E + 1] int32, where an expert's pairs begin
    active:   [E] int32, experts that have pairs; then -1
    """

    num_experts: int
    top_k: int
    ids: Tensor
    weights: Tensor
    tokens: Tensor
    places: Tensor
    starts: Tensor
    active: Tensor

    @staticmethod
    def allocate(*, num_tokens: int, num_experts: int, top_k: int) -> Choices:
        """Allocate room for so many tokens."""
        return Choices(
            num_experts=num_experts,
            top_k=top_k,
            ids=buffer((num_tokens, top_k), torch.int32),
            weights=buffer((num_tokens, top_k), torch.float32),
            tokens=buffer((num_tokens * top_k,), torch.int32),
            places=buffer((num_tokens, top_k), torch.int32),
            starts=buffer((num_experts + 1,), torch.int32),
            active=buffer((num_experts,), torch.int32),
        )

    def struct(self) -> ChoicesStruct:
        """Return what the library reads."""
        return ChoicesStruct(
            num_experts=self.num_experts,
            top_k=self.top_k,
            ids=self.ids.data_ptr(),
            weights=self.weights.data_ptr(),
            tokens=self.tokens.data_ptr(),
            places=self.places.data_ptr(),
            starts=self.starts.data_ptr(),
            active=self.active.data_ptr(),
        )
