"""How the ranks of one replica exchange tensors. Knows nothing of models, steps or Ray."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from remora.engine.parallel.layout import Layout


class Group(Protocol):
    """All ranks of a replica, as one of them sees the others.

    Every call is made by all ranks concerned, in the same order. Raises EngineError when another
    rank is gone or does not answer in time.
    """

    layout: Layout

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks of this stage, in place; returns `values`."""
        ...

    def send(self, values: Tensor, to: int) -> None:
        """Send to a rank, which must be receiving the same shape and dtype."""
        ...

    def receive(self, values: Tensor, source: int) -> Tensor:
        """Overwrite `values` with what a rank sends; returns `values`."""
        ...

    def close(self) -> None:
        """Leave the group; further calls do nothing."""
        ...


class Alone:
    """The Group of a single rank: sums are what they are, and there is nobody to send to."""

    layout = Layout()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return `values`."""
        return values

    def send(self, values: Tensor, to: int) -> None:
        """Nobody is there."""
        raise AssertionError(f"no rank {to}")

    def receive(self, values: Tensor, source: int) -> Tensor:
        """Nobody is there."""
        raise AssertionError(f"no rank {source}")

    def close(self) -> None:
        """Nothing to leave."""


ALONE = Alone()
