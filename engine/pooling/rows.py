"""A batch of whole rows for a pooling model, concatenated without padding.

Adjacent rows of equal length share one attention call. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from remora.engine.pooling.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows as device tensors. T: tokens of all rows.

    token_ids, positions:  [T] int64; positions count from 0 in each row
    types:      [T] int64: 1 in the second text of a pair
    lengths:    [num_rows] tokens of each row, on the host
    groups:     (first token, number of rows, length): runs of adjacent rows of equal length
    """

    token_ids: Tensor
    positions: Tensor
    types: Tensor
    lengths: tuple[int, ...]
    groups: tuple[tuple[int, int, int], ...]

    @property
    def starts(self) -> list[int]:
        """Return the first token of each row."""
        return list(accumulate(self.lengths, initial=0))[:-1]


def make_rows(rows: Sequence[Row], *, device: str = "cpu") -> RowBatch:
    """Build the batch of these rows, in this order."""
    lengths = tuple(len(row.token_ids) for row in rows)
    ids = [token for row in rows for token in row.token_ids]
    positions = torch.cat([torch.arange(length) for length in lengths])
    types = torch.zeros(len(ids), dtype=torch.int64)
    groups, start = [], 0
    for length, same in groupby(lengths):
        count = len(tuple(same))
        groups.append((start, count, length))
        start += count * length
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        if row.second is not None:
            types[start + row.second : start + length] = 1
        start += length
    return RowBatch(
        token_ids=torch.tensor(ids, dtype=torch.int64).to(device),
        positions=positions.to(device),
        types=types.to(device),
        lengths=lengths,
        groups=tuple(groups),
    )
