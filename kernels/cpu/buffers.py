"""Buffers of a step program: rows, low-rank updates, the paged cache and the batch's arrays."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from remora.kernels.cpu.library import Format, KvFormat, Team
from remora.kernels.cpu.structs import (
    BatchStruct,
    CacheStruct,
    LowRankStruct,
    RowsStruct,
    struct_of,
)
from remora.kernels.lora import COLUMNS, LowRankSlots
from remora.kernels.memory import buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Input rows of products: float32, bfloat16, or int8 in groups with scales.

    values:  [rows, k padded for the format]
    scales:  [rows, groups] float32; only in grouped formats
    sums:    [rows, groups] int32; only in grouped formats
    """

    format: Format
    values: Tensor
    scales: Tensor | None
    sums: Tensor | None

    @staticmethod
    def allocate(team: Team, format: Format, num_rows: int, k: int) -> Rows:
        """Allocate rows of k values each, for products with weights of a format."""
        format = format.of_rows
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
        """Wrap a float32 tensor [rows, k]."""
        return Rows(format=Format.F32, values=values, scales=None, sums=None)

    def struct(self) -> RowsStruct:
        """Return the library's view of it."""
        return struct_of(RowsStruct, self, stride=self.values.shape[1])


class Updates:
    """Low-rank updates of a weight, with the buffer for A x.

    slots:   adapter weights; may be written to between runs
    shrunk:  [rows, >= P * r] float32; consecutive products may share it
    first:   the updates' column that is the product's first; it begins a block of B
    """

    def __init__(self, slots: LowRankSlots, shrunk: Tensor, first: int = 0) -> None:
        if shrunk.shape[1] < slots.a.shape[1]:
            raise ValueError(
                f"the buffer is {list(shrunk.shape)}; it needs {slots.a.shape[1]} columns"
            )
        if first % COLUMNS:
            raise ValueError(f"column {first} is inside a block of {COLUMNS}")
        self.slots = slots
        self.shrunk = shrunk
        self.first = first
        self._bounds = torch.tensor(slots.bounds, dtype=torch.int32) - first

    def covers(self, num_columns: int) -> bool:
        """Return whether so many columns from the first on are whole parts."""
        return self.first + num_columns in self.slots.bounds

    def struct(self) -> LowRankStruct:
        """Return the library's view of it."""
        slots = self.slots
        return LowRankStruct(
            a=slots.a.data_ptr(),
            b=slots.b[0, self.first // COLUMNS :].data_ptr(),
            format=Format.of(slots.a.dtype),
            inputs=slots.a.shape[2],
            outputs=slots.bounds[-1] - self.first,
            num_parts=len(slots.bounds) - 1,
            max_rank=slots.max_rank,
            num_blocks=slots.b.shape[1],
            ranks=slots.ranks.ctypes.data,
            bounds=self._bounds.data_ptr(),
            shrunk=self.shrunk.data_ptr(),
            stride=self.shrunk.shape[1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCache:
    """K and V of all layers, in pages with the layout of src/attention.h.

    data:           [num_layers, num_pages, bytes of a page]; the caller reserves page 0 for padding
    format:         of the products with it; not grouped
    kv_format:      of its numbers; PLAIN = `format`
    is_windowed:    page ids come from the batch's window tables
    static_scales:  [num_layers, 2, num_kv_heads] bfloat16, of all tokens in 8 bits; None = each has
                    its own
    """

    data: Tensor
    format: Format
    page_size: int
    num_kv_heads: int
    head_dim: int
    kv_format: KvFormat = KvFormat.PLAIN
    is_windowed: bool = False
    static_scales: Tensor | None = None

    @staticmethod
    def allocate(
        team: Team,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: Format,
        kv_format: KvFormat = KvFormat.PLAIN,
        is_windowed: bool = False,
        static_scales: Tensor | None = None,
    ) -> PagedCache:
        """Allocate zeroed pages; `page_size` is a multiple of 16."""
        if page_size % 16:
            raise ValueError(f"page_size must be a multiple of 16, not {page_size}")
        shape_of_scales = (num_layers, 2, num_kv_heads)
        if static_scales is not None and static_scales.shape != shape_of_scales:
            raise ValueError(f"static scales of {list(static_scales.shape)}, not {shape_of_scales}")
        shape = CacheStruct(
            format=format,
            kv_format=kv_format,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        page_bytes = team.library.page_bytes(byref(shape))
        return PagedCache(
            data=buffer((num_layers, num_pages, page_bytes), torch.uint8),
            format=format,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_format=kv_format,
            is_windowed=is_windowed,
            static_scales=None if static_scales is None else static_scales.contiguous(),
        )

    def struct(self) -> CacheStruct:
        """Return the library's view of it."""
        return struct_of(CacheStruct, self, num_pages=self.data.shape[1])


class Batch:
    """Input arrays of a program's step: the caller fills them, then runs the program.

    token_ids, positions, slots:  [max_tokens] int64
    starts:                       [max_rows + 1] int32, first token of each sequence
    lengths, table_rows:          [max_rows] int32
    logit_index:                  [max_logits] int32
    adapters:                     [max_tokens] int32, slots counted from 1; 0 = none
    tables:                       [rows, pages] int32, page ids; owned by the caller
    window_slots, window_tables:  as `slots` and `tables`, for windowed caches
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
        self.token_ids, self.positions, self.slots, self.window_slots = (
            buffer((max_tokens,), torch.int64).numpy() for _ in range(4)
        )
        self.starts = buffer((max_rows + 1,), torch.int32).numpy()
        self.lengths = buffer((max_rows,), torch.int32).numpy()
        self.table_rows = buffer((max_rows,), torch.int32).numpy()
        self.logit_index = buffer((max_logits,), torch.int32).numpy()
        self.adapters = buffer((max_tokens,), torch.int32).numpy()
        self.tables = tables
        self.window_tables = window_tables

    def struct(self) -> BatchStruct:
        """Return the library's view of it."""
        counts = {"num_tokens": 0, "num_sequences": 0, "num_logits": 0}
        return struct_of(BatchStruct, self, table_stride=self.tables.stride(0), **counts)
