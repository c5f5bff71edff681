"""Rows of a batch, sorted by adapter slot and cut into tiles of one slot each.

Each program of a kernel computes one tile, so one launch covers all adapters of a step. Tiles are
cut once per step on the host. Knows nothing of the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.kernels.memory import to_device

SMALL_TILE, LARGE_TILE = 16, 64  # rows
MANY_ROWS = 128


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles and their rows. Further tiles with empty ranges may follow.

    rows:   [count] int32, sorted by slot, without rows of no adapter
    tiles:  [num_tiles, 3] int32: a slot, counted from 0, and the half-open range of `rows`
    size:   most rows of a tile
    """

    rows: Tensor
    tiles: Tensor
    size: int

    @classmethod
    def of(cls, slots: npt.NDArray[np.int32], device: torch.device) -> RowTiles:
        """Cut rows into tiles and copy them to the device.

        slots:  [T], counted from 1; 0 = no adapter
        """
        size = tile_size(int(np.count_nonzero(slots)))
        rows, tiles = cut_tiles(slots, size)
        there = to_device(np.concatenate([rows, tiles.ravel()]), device)
        return cls(there[: len(rows)], there[len(rows) :].view(-1, 3), size)


def cut_tiles(
    slots: npt.NDArray[np.int32], size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return `rows` and `tiles` of RowTiles.

    slots:  [T], counted from 1; 0 = no adapter
    """
    adapted = np.flatnonzero(slots)
    rows = adapted[np.argsort(slots[adapted], kind="stable")]
    groups = np.unique(slots[rows], return_index=True, return_counts=True)
    tiles = [
        (slot - 1, first, min(first + size, start + count))
        for slot, start, count in zip(*(part.tolist() for part in groups), strict=True)
        for first in range(start, start + count, size)
    ]
    return rows.astype(np.int32), np.array(tiles, dtype=np.int32).reshape(-1, 3)


def tile_size(num_rows: int) -> int:
    """Return the rows of a tile: small tiles for decode steps."""
    return SMALL_TILE if num_rows < MANY_ROWS else LARGE_TILE
