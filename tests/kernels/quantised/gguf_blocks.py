"""Random blocks of GGUF, and what they mean by the gguf library."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from remora.kernels.quantised.block_weight import BLOCK_TYPES, BlockWeight

# Bytes of a block where a float16 begins.
FLOAT16 = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_blocks(type: str, n: int, k: int) -> BlockWeight:
    """Return a weight [n, k] of random bytes; scales are moderate, some negative and some 0."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[Kind[type]]
    blocks = torch.randint(256, (n, k // size, num_bytes), dtype=torch.uint8)
    for start in FLOAT16[type]:
        scales = torch.randn(n, k // size, 1) * (torch.rand(n, k // size, 1) > 0.2)
        blocks[..., start : start + 2] = scales.half().view(torch.uint8)
    return BlockWeight(blocks=blocks.flatten(1), type=type, size=(n, k))


def by_the_library(weight: BlockWeight) -> Tensor:
    """Return the weight [n, k] as the gguf library dequantises it."""
    values = gguf.dequantize(weight.blocks.numpy(), Kind[weight.type])
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).view(weight.size)


ALL = tuple(BLOCK_TYPES)
