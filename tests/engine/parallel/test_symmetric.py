"""Sums through symmetric memory, with threads as ranks and tensors that they share."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.parallel.connect import RankGroup
from remora.engine.parallel.symmetric import MOST_BYTES, SymmetricGroup
from tests.engine.parallel.ranks import connected


class SharedMemory:
    """SymmetricMemory of threads: each rank reads the parts of all, by name."""

    def __init__(self, size: int) -> None:
        self.parts: dict[str, dict[int, Tensor]] = {}
        self.rank = threading.local()
        self.barrier = threading.Barrier(size)
        self.num_sums = 0

    def join(self, name: str, rank: int, size: int, store: Any, num_bytes: int) -> Tensor:
        assert store is not None
        self.rank.number = rank
        part = torch.zeros(num_bytes, dtype=torch.uint8)
        self.parts.setdefault(name, {})[rank] = part
        self.barrier.wait(10)
        assert len(self.parts[name]) == size
        return part

    def sum(self, buffer: Tensor, values: Tensor, name: str) -> Tensor:
        own = self.parts[name][self.rank.number]
        assert buffer.data_ptr() == own.data_ptr()
        assert (buffer.shape, buffer.dtype) == (values.shape, values.dtype)
        buffer.copy_(values)
        self.barrier.wait(10)
        parts = [
            part[: values.nbytes].view(values.dtype).view(values.shape)
            for _, part in sorted(self.parts[name].items())
        ]
        made = torch.stack(parts).sum(0)
        self.barrier.wait(10)
        self.num_sums += self.rank.number == 0
        return made


@pytest.mark.observes("parallel.symmetric_memory")
@pytest.mark.parametrize(
    ("shape", "dtype", "is_shared"),
    [
        ((3, 64), torch.float32, True),
        ((1, 8), torch.bfloat16, True),
        ((3, 1), torch.float32, False),  # not a multiple of what is added at a time
        ((2,), torch.int64, False),
        ((MOST_BYTES // 4 + 4,), torch.float32, False),
        ((0, 8), torch.float32, False),
    ],
)
def test_few_values_are_summed_in_place(
    shape: tuple[int, ...], dtype: torch.dtype, is_shared: bool
) -> None:
    memory = SharedMemory(2)
    with connected(2) as (threads, groups):

        def join(rank: int) -> SymmetricGroup:
            return SymmetricGroup(cast("RankGroup", groups[rank]), memory)

        joined = threads.on_all(join)

        def add(rank: int) -> tuple[Tensor, Tensor]:
            values = torch.full(shape, rank + 2).to(dtype)
            return values, joined[rank].all_reduce(values)

        for values, made in threads.on_all(add):
            assert made is values
            assert values.tolist() == torch.full(shape, 5).to(dtype).tolist()
    assert memory.num_sums == is_shared


def test_memory_that_cannot_be_mapped_is_a_configuration_error() -> None:
    class Unmapped(SharedMemory):
        def join(self, name: str, rank: int, size: int, store: Any, num_bytes: int) -> Tensor:
            raise RuntimeError("no peer access\nbetween GPUs")

    with connected(2) as (threads, groups):

        def join(rank: int) -> None:
            with pytest.raises(ConfigError, match=r"symmetric_memory = true: rank .*peer access\)"):
                SymmetricGroup(cast("RankGroup", groups[rank]), Unmapped(2))

        threads.on_all(join)
