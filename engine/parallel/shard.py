"""The part of a checkpoint's tensor that a rank holds. Knows no files and no other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remora.engine.parallel.layout import NOTHING


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: its size, and the range that the rank holds."""

    size: int
    held: range

    @classmethod
    def whole(cls, size: int) -> Axis:
        """Return a dimension that is held completely."""
        return cls(size, range(size))

    @classmethod
    def nothing(cls, size: int) -> Axis:
        """Return a dimension of which nothing is held."""
        return cls(size, NOTHING)

    @property
    def is_whole(self) -> bool:
        """Whether everything is held."""
        return len(self.held) == self.size

    def times(self, length: int) -> Axis:
        """Return the dimension with each element repeated `length` times."""
        start, stop = self.held.start * length, self.held.stop * length
        return Axis(self.size * length, range(start, stop))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """Memory for the held part of a tensor.

    memory:  shape [length of each axis's held range]
    offset:  added to the checkpoint's values
    """

    memory: Tensor
    axes: tuple[Axis, ...]
    offset: float = 0.0

    @classmethod
    def whole(cls, memory: Tensor) -> Shard:
        """Return memory for all of a tensor."""
        return cls(memory=memory, axes=tuple(Axis.whole(size) for size in memory.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices of the held part in the whole tensor."""
        return tuple(slice(axis.held.start, axis.held.stop) for axis in self.axes)

    def fill(self, whole: Tensor) -> None:
        """Copy the part from the whole tensor, converting to the memory's dtype and device."""
        self.memory.copy_(whole[self.index])
        if self.offset:
            self.memory.add_(self.offset)
