"""Tiles of rows: each row of an adapter in one, and none with rows of two."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.kernels.row_tiles import LARGE_TILE, MANY_ROWS, SMALL_TILE, RowTiles, tile_size

CPU = torch.device("cpu")
SLOTS = st.lists(st.integers(0, 5), max_size=300)


@given(slots=SLOTS)
def test_each_row_of_an_adapter_is_in_one_tile_of_its_slot(slots: list[int]) -> None:
    made = RowTiles.of(np.array(slots, dtype=np.int32), CPU)

    found = [
        (row, slot + 1)
        for slot, first, stop in made.tiles.tolist()
        for row in made.rows[first:stop].tolist()
    ]

    assert sorted(found) == [(row, slot) for row, slot in enumerate(slots) if slot > 0]
    assert len(made.rows) == len(found)


@given(slots=SLOTS)
def test_tiles_are_as_few_as_their_size_allows(slots: list[int]) -> None:
    made = RowTiles.of(np.array(slots, dtype=np.int32), CPU)

    lengths = (made.tiles[:, 2] - made.tiles[:, 1]).tolist()

    counts = [slots.count(slot) for slot in set(slots) - {0}]
    assert len(lengths) == sum(-(-count // made.size) for count in counts)
    assert all(0 < length <= made.size for length in lengths)


def test_many_rows_make_large_tiles() -> None:
    assert tile_size(MANY_ROWS - 1) == SMALL_TILE
    assert tile_size(MANY_ROWS) == LARGE_TILE
