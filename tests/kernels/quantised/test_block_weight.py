"""Blocks of GGUF split into codes and scales, against the gguf library."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from remora.kernels.quantised.block_weight import BLOCK_TYPES, BlockWeight
from tests.kernels.quantised.gguf_blocks import ALL, by_the_library, random_blocks


@pytest.mark.parametrize("type", ALL)
def test_values_are_those_of_the_library(type: str) -> None:
    weight = random_blocks(type, 7, 768)

    assert torch.equal(weight.dequantised(), by_the_library(weight))
    assert torch.equal(weight.rows(2, 5), by_the_library(weight)[2:5])


@pytest.mark.parametrize("type", ALL)
def test_sizes_are_those_of_the_library(type: str) -> None:
    entry = BLOCK_TYPES[type]

    assert (entry.size, entry.num_bytes) == gguf.GGML_QUANT_SIZES[Kind[type]]


def test_selected_rows_are_whole_rows_in_that_order() -> None:
    weight = random_blocks("Q4_K", 5, 256)
    order = torch.tensor([4, 0, 3])

    assert torch.equal(weight.select(order).dequantised(), weight.dequantised()[order])


@pytest.mark.parametrize(
    ("type", "size", "num_bytes"), [("Q4_K", (2, 256), 143), ("Q4_K", (2, 288), 162)]
)
def test_bytes_that_are_no_blocks_are_refused(
    type: str, size: tuple[int, int], num_bytes: int
) -> None:
    with pytest.raises(ValueError, match=r"are not Q4_K blocks of a weight \[2, "):
        BlockWeight(blocks=torch.zeros(2, num_bytes, dtype=torch.uint8), type=type, size=size)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="IQ1_S blocks are not computed with; known are Q4_0"):
        BlockWeight(blocks=torch.zeros(1, 50, dtype=torch.uint8), type="IQ1_S", size=(1, 256))
