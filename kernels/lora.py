"""Low-rank updates of one weight, a slot for each adapter: y += B_s (A_s x), s the slot of the row.

All adapters of a batch share the product with the base weight; each adds two small products of its
own rows, grouped by slot (Punica, arXiv:2310.18547; S-LoRA, arXiv:2311.03285). Rows without an
adapter are not touched and keep their bits.

The torch code specifies the kernels of `gpu/lora.py`, which compute with Triton.

Legend: N slots, I inputs, O outputs of all parts, P parts, r largest rank of a part, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.memory import buffer
from remora.kernels.row_tiles import RowTiles


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows of a tensor [T, ...] grouped by slot; rows without an adapter are in no group.

    groups:  slots, ascending, each with its rows [count] int64
    tiles:   the same for Triton; None = torch computes
    """

    groups: tuple[tuple[int, Tensor], ...] = ()
    tiles: RowTiles | None = None

    @classmethod
    def of(cls, slots: npt.NDArray[np.int32], device: torch.device) -> RowGroups:
        """Group rows for the implementation that serves a device.

        slots:  [T], counted from 1; 0 = no adapter
        """
        if by_triton(device):
            return cls(tiles=RowTiles.of(slots, device))
        return cls(
            tuple(
                (slot - 1, torch.from_numpy(np.flatnonzero(slots == slot)).to(device))
                for slot in np.unique(slots).tolist()
                if slot > 0
            )
        )


NO_GROUPS = RowGroups()
COLUMNS = 64  # of a block of B; equals LowRank::COLUMNS in src/low_rank.h


class LowRankSlots:
    """Updates of a weight [O, I] whose rows form P parts, each with its own A and B.

    a:       [N, P * r, I]
    b:       [N, O / COLUMNS, r, COLUMNS], scaled, padded with zeros; a part's columns multiply the
             result of its A. A product over blocks of columns reads it sequentially.
    ranks:   [N] int32, the largest rank in use; A and B are zero beyond it
    bounds:  [P + 1], the first column of each part
    """

    def __init__(
        self,
        num_slots: int,
        inputs: int,
        parts: Sequence[int],
        max_rank: int,
        *,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.max_rank = max_rank
        self.bounds = tuple(accumulate(parts, initial=0))
        self.a = _zeros((num_slots, len(parts) * max_rank, inputs), dtype, device)
        num_blocks = -(-self.bounds[-1] // COLUMNS)
        self.b = _zeros((num_slots, num_blocks, max_rank, COLUMNS), dtype, device)
        self.ranks = np.zeros(num_slots, dtype=np.int32)
        self._ranks = torch.from_numpy(self.ranks).to(device)  # on a CPU shares the memory
        self._bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.a.nbytes + self.b.nbytes

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        self._set_rank(slot, 0)

    def write(self, slot: int, part: int, a: Tensor, b: Tensor) -> None:
        """Write one part's update to an empty slot.

        a:  [rank, I];  b: [outputs of the part, rank], scaled
        """
        rank, first = len(a), part * self.max_rank
        self.a[slot, first : first + rank] = a
        whole = self._b_of(slot, self.max_rank).clone()
        whole[:rank, self.bounds[part] : self.bounds[part + 1]] = b.T
        self.b[slot] = whole.view(self.max_rank, -1, COLUMNS).transpose(0, 1)
        self._set_rank(slot, max(int(self.ranks[slot]), rank))

    def add(self, x: Tensor, y: Tensor, rows: RowGroups) -> None:
        """Add each row's update to y [T, O], in place.

        x:  [T, I]
        """
        self._add(x, y, rows, is_lookup=False)

    def add_looked_up(self, token_ids: Tensor, y: Tensor, rows: RowGroups) -> None:
        """Add updates to rows y [T, O] of an embedding lookup (one-hot inputs).

        token_ids:  [T], each below I
        """
        self._add(token_ids, y, rows, is_lookup=True)

    def _add(self, x: Tensor, y: Tensor, rows: RowGroups, *, is_lookup: bool) -> None:
        """Add updates; `x` holds inputs or token ids."""
        if rows.tiles is not None:
            self._add_tiles(x, y, rows.tiles, is_lookup=is_lookup)
        for slot, index in rows.groups:
            rank = int(self.ranks[slot])
            if rank > 0:
                a = self._a_of(slot, rank)
                shrunk = a[:, x[index]].T if is_lookup else x[index] @ a.T
                y.index_add_(0, index, self._expanded(slot, rank, shrunk).to(y.dtype))

    def _add_tiles(self, x: Tensor, y: Tensor, tiles: RowTiles, *, is_lookup: bool) -> None:
        """Add updates with Triton."""
        from remora.kernels.gpu import lora as kernels

        _, width, inputs = self.a.shape
        splits = 1 if is_lookup else kernels.splits_of(inputs, tiles)
        shrunk = torch.empty(
            (len(tiles.rows), splits, width), dtype=torch.float32, device=self.a.device
        )
        shrink = kernels.look_up if is_lookup else kernels.shrink
        shrink(x, self.a, self._ranks, tiles, shrunk, max_rank=self.max_rank)
        kernels.expand(shrunk, self.b, self._ranks, self._bounds, tiles, y)

    def _set_rank(self, slot: int, rank: int) -> None:
        self.ranks[slot] = rank
        self._ranks[slot] = rank

    def _a_of(self, slot: int, rank: int) -> Tensor:
        """Return A of all parts, [P * rank, I]."""
        a = self.a[slot]
        return a.view(-1, self.max_rank, a.shape[1])[:, :rank].flatten(0, 1)

    def _b_of(self, slot: int, rank: int) -> Tensor:
        """Return B, [rank, O padded]."""
        return self.b[slot, :, :rank].transpose(0, 1).flatten(1)

    def _expanded(self, slot: int, rank: int, shrunk: Tensor) -> Tensor:
        """Multiply [count, P * rank] with B; returns [count, O]."""
        b = self._b_of(slot, rank)[:, : self.bounds[-1]]
        if len(self.bounds) == 2:
            return shrunk @ b
        parts = [
            shrunk[:, part * rank : (part + 1) * rank] @ b[:, start:stop]
            for part, (start, stop) in enumerate(pairwise(self.bounds))
        ]
        return torch.cat(parts, dim=1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if device == "cpu":
        return buffer(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
