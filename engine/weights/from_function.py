"""Weights that an operator's function returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor

from remora.configs.errors import ConfigError


class GivenWeights:
    """WeightSource over tensors in memory."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]], label: str) -> None:
        """Collect pairs of name and tensor. Raises ConfigError for anything else."""
        self.label = label
        self._tensors: dict[str, Tensor] = {}
        for pair in pairs:
            match pair:
                case (str(name), Tensor() as tensor):
                    self._tensors[name] = tensor
                case _:
                    raise ConfigError(f"{label}: expected pairs of a name and a tensor")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names."""
        for name, tensor in self._tensors.items():
            if name in names:
                yield name, tensor
