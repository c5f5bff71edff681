"""Launches of low-rank updates, as an 8B model's layers make them."""

from __future__ import annotations

from functools import partial

import torch

from remora.kernels.gpu import lora
from remora.kernels.lora import COLUMNS
from remora.kernels.row_tiles import LARGE_TILE, SMALL_TILE, RowTiles
from tests.kernels.gpu.devices import empty

INPUTS, OUTPUTS, SLOTS, MAX_RANK, TOKENS = 4096, 6144, 8, 64, 256


def launch(size: int, dtype: torch.dtype) -> None:
    ints = torch.int32
    tiles = RowTiles(empty(TOKENS, dtype=ints), empty(8, 3, dtype=ints), size)
    ranks, bounds = empty(SLOTS, dtype=ints), empty(4, dtype=ints)
    a = empty(SLOTS, 3 * MAX_RANK, INPUTS, dtype=dtype)
    b = empty(SLOTS, OUTPUTS // COLUMNS, MAX_RANK, COLUMNS, dtype=dtype)
    x, y = empty(TOKENS, INPUTS, dtype=dtype), empty(TOKENS, OUTPUTS, dtype=dtype)
    splits = lora.splits_of(INPUTS, tiles)
    shrunk = empty(TOKENS, splits, 3 * MAX_RANK)
    ids = empty(TOKENS, dtype=torch.int64)
    lora.shrink(x, a, ranks, tiles, shrunk, max_rank=MAX_RANK)
    lora.look_up(ids, a, ranks, tiles, shrunk[:, :1], max_rank=MAX_RANK)
    lora.expand(shrunk, b, ranks, bounds, tiles, y)


LAUNCHES = {
    f"tile {size} {dtype}": partial(launch, size, dtype)
    for size, dtype in (
        (SMALL_TILE, torch.bfloat16),
        (LARGE_TILE, torch.bfloat16),
        (LARGE_TILE, torch.float16),
        (LARGE_TILE, torch.float32),
    )
}
