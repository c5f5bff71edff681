"""Sums of few values through memory that the GPUs of a stage map into each other.

torch's symmetric memory: in one kernel, which graphs can capture, each rank copies its values into
its part and adds what it reads from all parts. Many values go through nccl as before. Never run on
GPUs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.parallel.connect import RankGroup
from remora.engine.parallel.group import Group

# Every rank reads the values of all ranks; nccl moves less where there are more values.
MOST_BYTES = 2**18
ALIGNMENT = 16  # bytes that the kernel adds at a time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SymmetricMemory(Protocol):
    """torch's functions, or others in their place."""

    def join(self, name: str, rank: int, size: int, store: Any, num_bytes: int) -> Tensor:
        """Allocate this rank's part, [num_bytes] uint8; all ranks of `name` call it."""

    def sum(self, buffer: Tensor, values: Tensor, name: str) -> Tensor:
        """Return the sum of all ranks' values.

        buffer:  of the shape and dtype of `values`, at the beginning of this rank's part
        """


class TorchSymmetricMemory:
    """SymmetricMemory of `torch.distributed._symmetric_memory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def join(self, name: str, rank: int, size: int, store: Any, num_bytes: int) -> Tensor:
        """Allocate this rank's part; see `SymmetricMemory`.

        The group is registered by name only, because ours are not torch's global ones.
        """
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        symmetric._SymmetricMemory.set_group_info(name, rank, size, store)
        buffer: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device)
        symmetric._SymmetricMemory.rendezvous(buffer, name)
        return buffer

    def sum(self, buffer: Tensor, values: Tensor, name: str) -> Tensor:
        """Return the sum of all ranks' values; see `SymmetricMemory`."""
        made: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, values, "sum", name)
        return made


class SymmetricGroup:
    """Group over another one, with sums of few values through symmetric memory."""

    def __init__(self, group: RankGroup, memory: SymmetricMemory) -> None:
        """Allocate the memory. All ranks call it at about the same time. Raises ConfigError."""
        layout = group.layout
        self.layout = layout
        self._group: Group = group
        self._memory = memory
        self._name = f"remora stage {layout.stage}"
        try:
            self._buffer = memory.join(
                self._name, layout.tp_rank, layout.tp_size, group.store, MOST_BYTES
            )
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"parallel.symmetric_memory = true: rank {layout.rank} cannot map the memory of "
                f"the other GPUs ({str(error).splitlines()[0]}); leave it out"
            ) from error

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks of this stage, in place; returns `values`."""
        num_bytes = values.nbytes
        if not 0 < num_bytes <= MOST_BYTES or num_bytes % ALIGNMENT or values.dtype not in DTYPES:
            return self._group.all_reduce(values)
        dense = values.contiguous()
        buffer = self._buffer[:num_bytes].view(dense.dtype).view(dense.shape)
        return values.copy_(self._memory.sum(buffer, dense, self._name))

    def broadcast(self, values: Tensor) -> Tensor:
        """Overwrite `values` with rank 0's, on all ranks of the replica; returns `values`."""
        return self._group.broadcast(values)

    def send(self, values: Tensor, to: int) -> None:
        """Send to a rank, which must be receiving the same shape and dtype."""
        self._group.send(values, to)

    def receive(self, values: Tensor, source: int) -> Tensor:
        """Overwrite `values` with what a rank sends; returns `values`."""
        return self._group.receive(values, source)

    def close(self) -> None:
        """Leave the group; further calls do nothing."""
        self._group.close()
