"""Sampled tokens on their way from rank 0 to the other ranks, from device to device.

The next step begins on every rank before any host knows these tokens. Rank 0 shares them after it
has sampled a step, the others expect them after that step's forward pass: the same place in the
order of exchanges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remora.engine.parallel.group import Group
from remora.engine.protocols import DeviceTokens


class SharedTokens:
    """DeviceTokens of rank 0 that reach all ranks; on the others, what receives them."""

    def __init__(self, own: DeviceTokens, group: Group, device: torch.device) -> None:
        self._own = own
        self._group = group
        self._device = device

    def set_last_tokens(self, token_ids: Tensor) -> None:
        """Keep the newest tokens on all ranks; see `protocols.DeviceTokens`. On rank 0."""
        self._own.set_last_tokens(self._group.broadcast(token_ids.to(self._device)))

    def receive(self, num_rows: int) -> None:
        """Keep the newest tokens that rank 0 has sampled for so many rows. On the other ranks."""
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        self._own.set_last_tokens(self._group.broadcast(token_ids))
