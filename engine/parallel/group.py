"""How the ranks of one replica exchange tensors. Knows nothing of models, steps or Ray."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from remora.engine.parallel.layout import Layout


class Group(Protocol):
    """All ranks of a replica, as seen by one of them.

    All ranks concerned make each call, in the same order. Raises EngineError when another rank is
    gone or does not answer in time.
    """

    layout: Layout

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks of this stage, in place; returns `values`."""

    def send(self, values: Tensor, to: int) -> None:
        """Send to a rank, which must be receiving the same shape and dtype."""

    def receive(self, values: Tensor, source: int) -> Tensor:
        """Overwrite `values` with what a rank sends; returns `values`."""

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` with rank 0's, on all ranks of the replica; returns `values`."""

    def close(self) -> None:
        """Leave the group; further calls do nothing."""


class Alone:
    """The Group of a single rank."""

    layout = Layout()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return `values`."""
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """Return `values`."""
        return values

    def send(self, values: Tensor, to: int) -> None:
        """Fail: there is no other rank."""
        raise AssertionError(f"no rank {to}")

    def receive(self, values: Tensor, source: int) -> Tensor:
        """Fail: there is no other rank."""
        raise AssertionError(f"no rank {source}")

    def close(self) -> None:
        """Do nothing."""


ALONE = Alone()
