"""What a rank holds of a checkpoint's tensor. Knows nothing of files or of other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remora.engine.parallel.layout import NOTHING


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: its size, and the range of it that is held."""

    size: int
    held: range

    @classmethod
    def whole(cls, size: int) -> Axis:
        """Return a dimension of which everything is held."""
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
        """Return the dimension with `length` elements in the place of each."""
        start, stop = self.held.start * length, self.held.stop * length
        return Axis(self.size * length, range(start, stop))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """Memory for the held part of a tensor.

    memory:  [what is held of each axis]
    offset:  added to what the checkpoint has
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
        """Return the shape of the whole tensor."""
        return tuple(axis.size for axis in self.axes)

    @property
    def index(self) -> tuple[slice, ...]:
        """Return where the part lies in the whole tensor."""
        return tuple(slice(axis.held.start, axis.held.stop) for axis in self.axes)

    def fill(self, whole: Tensor) -> None:
        """Copy the part out of the whole tensor, converting to the memory's dtype and device."""
        self.memory.copy_(whole[self.index])
        if self.offset:
            self.memory.add_(self.offset)
