"""Tensors come back from a layer's bytes as they were, and host memory is not wasted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.configs.errors import ConfigError
from remora.engine.offload import host_memory
from remora.engine.offload.host_memory import SMALLEST_CHUNK, HostWeights, chunk_sizes
from remora.engine.offload.streams import CudaCopies, copy_parts


def allocate(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_tensors_of_all_formats_and_strides_come_back_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "SMALLEST_CHUNK", 64)  # tensors lie across chunks
    base = torch.randn(6, 4, 5)
    tensors = [
        base,
        base.permute(2, 0, 1),
        base[1:4, :, 2],
        base[:1].expand(3, 4, 5),
        base.bfloat16(),
        base.to(torch.float8_e4m3fn),
        torch.arange(7, dtype=torch.int64),
        torch.arange(99, dtype=torch.uint8),
        torch.tensor(2.5),
        torch.empty(0, 3),
    ]

    held = HostWeights(tensors, allocate)
    memory = torch.zeros(held.num_bytes + 10, dtype=torch.uint8)
    copy_parts(memory, held.chunks)
    again = list(held.tensors(memory))

    assert len(held.chunks) > 2
    assert len(again) == len(tensors)
    for before, after in zip(tensors, again, strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert bits(after) == bits(before)
        assert after.numel() == 0 or memory.data_ptr() <= after.data_ptr()
    assert again[1].stride() == tensors[1].stride()


@given(st.integers(0, 2**40))
def test_memory_is_allocated_in_powers_of_two(num_bytes: int) -> None:
    sizes = chunk_sizes(num_bytes)

    assert sum(sizes) == num_bytes
    assert all(size & (size - 1) == 0 for size in sizes if size >= SMALLEST_CHUNK)
    assert sum(size < SMALLEST_CHUNK for size in sizes) <= 1
    assert sizes == sorted(set(sizes), reverse=True)


def test_memory_that_cannot_be_page_locked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> Tensor:
        assert options["pin_memory"] is True
        raise RuntimeError("CUDA error: out of memory\nsecond line")

    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    streams = CudaCopies(torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", fail)

    with pytest.raises(ConfigError, match=r"offload: 64 bytes .* \(CUDA error: out of memory\)"):
        streams.pinned(64)
