"""What a step program works on besides weights: rows, the paged cache, the batch's arrays."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.library import Format, Team
from remora.kernels.cpu.structs import BatchStruct, CacheStruct, LowRankStruct, RowsStruct
from remora.kernels.lora import LowRankSlots
from remora.kernels.memory import buffer, is_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What products read: rows of float32, of bfloat16, or of int8 in groups with their scales.

    values:  [rows, k padded for the format]
    scales:  [rows, groups] float32; grouped formats alone
    sums:    [rows, groups] int32; grouped formats alone
    """

    format: Format
    values: Tensor
    scales: Tensor | None
    sums: Tensor | None

    @staticmethod
    def allocate(team: Team, format: Format, num_rows: int, k: int) -> Rows:
        """Allocate rows of k values each."""
        padded = team.library.padded_k(format, k)
        dtype = {Format.F32: torch.float32, Format.BF16: torch.bfloat16}.get(format, torch.int8)
        groups = (num_rows, padded // team.library.group_size(format))
        return Rows(
            format=format,
            values=buffer((num_rows, padded), dtype),
            scales=buffer(groups, torch.float32) if format.is_grouped else None,
            sums=buffer(groups, torch.int32) if format.is_grouped else None,
        )

    @staticmethod
    def of(values: Tensor) -> Rows:
        """Take float32 [rows, k] for rows."""
        return Rows(format=Format.F32, values=values, scales=None, sums=None)

    def struct(self) -> RowsStruct:
        """Return what the library reads."""
        return RowsStruct(
            values=self.values.data_ptr(),
            stride=self.values.shape[1],
            scales=None if self.scales is None else self.scales.data_ptr(),
            sums=None if self.sums is None else self.sums.data_ptr(),
        )


class Updates:
    """Low-rank updates of a weight, and where A x goes before B is multiplied with it.

    slots:   which may be written to between runs
    shrunk:  [rows, P * r or more] float32; products one after the other may use the same
    """

    def __init__(self, slots: LowRankSlots, shrunk: Tensor) -> None:
        if shrunk.shape[1] < slots.a.shape[1]:
            raise ValueError(f"{slots.a.shape[1]} columns are needed; got {list(shrunk.shape)}")
        self.slots = slots
        self.shrunk = shrunk
        self._bounds = torch.tensor(slots.bounds, dtype=torch.int32)

    def struct(self) -> LowRankStruct:
        """Return what the library reads."""
        slots = self.slots
        return LowRankStruct(
            a=slots.a.data_ptr(),
            b=slots.b.data_ptr(),
            is_bf16=is_bf16(slots.a),
            inputs=slots.a.shape[2],
            outputs=slots.bounds[-1],
            num_parts=len(slots.bounds) - 1,
            max_rank=slots.max_rank,
            ranks=slots.ranks.ctypes.data,
            bounds=self._bounds.data_ptr(),
            shrunk=self.shrunk.data_ptr(),
            stride=self.shrunk.shape[1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """K and V of all layers, in pages; the layout is that of src/attention.h.

    data:         [num_layers, num_pages, bytes of a page]; the caller keeps page 0 for padding
    is_windowed:  its pages are those of the batch's window tables
    """

    data: Tensor
    is_bf16: bool
    page_size: int
    num_kv_heads: int
    head_dim: int
    is_windowed: bool = False

    @staticmethod
    def allocate(
        team: Team,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        is_bf16: bool,
        is_windowed: bool = False,
    ) -> PagedCache:
        """Allocate zeroed pages. `page_size` must be a multiple of 16."""
        if page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, not {page_size}")
        shape = CacheStruct(
            is_bf16=is_bf16, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        page_bytes = team.library.page_bytes(byref(shape))
        return PagedCache(
            data=buffer((num_layers, num_pages, page_bytes), torch.uint8),
            is_bf16=is_bf16,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            is_windowed=is_windowed,
        )

    def struct(self) -> CacheStruct:
        """Return what the library reads."""
        return CacheStruct(
            data=self.data.data_ptr(),
            is_bf16=self.is_bf16,
            is_windowed=self.is_windowed,
            num_pages=self.data.shape[1],
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


class Batch:
    """The arrays that a program reads its step from; write to them, then run.

    token_ids, positions, slots:  [max_tokens] int64
    starts:                       [max_rows + 1] int32, first token of each sequence
    lengths, table_rows:          [max_rows] int32
    logit_index:                  [max_logits] int32
    adapters:                     [max_tokens] int32, slots counted from 1; 0 = none
    tables:                       [rows, pages] int32, the caller's own array of page ids
    window_slots, window_tables:  as `slots` and `tables`, for caches that are windowed
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        max_logits: int,
        tables: Tensor,
        window_tables: Tensor | None = None,
    ) -> None:
        self.token_ids = buffer((max_tokens,), torch.int64).numpy()
        self.positions = buffer((max_tokens,), torch.int64).numpy()
        self.slots = buffer((max_tokens,), torch.int64).numpy()
        self.starts = buffer((max_rows + 1,), torch.int32).numpy()
        self.lengths = buffer((max_rows,), torch.int32).numpy()
        self.table_rows = buffer((max_rows,), torch.int32).numpy()
        self.logit_index = buffer((max_logits,), torch.int32).numpy()
        self.adapters = buffer((max_tokens,), torch.int32).numpy()
        self.tables = tables
        self.window_tables = window_tables
        self.window_slots = buffer((max_tokens,), torch.int64).numpy()

    def struct(self) -> BatchStruct:
        """Return what the library reads."""
        return BatchStruct(
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            slots=self.slots.ctypes.data,
            starts=self.starts.ctypes.data,
            lengths=self.lengths.ctypes.data,
            table_rows=self.table_rows.ctypes.data,
            tables=self.tables.data_ptr(),
            table_stride=self.tables.stride(0),
            window_slots=self.window_slots.ctypes.data,
            window_tables=None if self.window_tables is None else self.window_tables.data_ptr(),
            logit_index=self.logit_index.ctypes.data,
            adapters=self.adapters.ctypes.data,
        )
