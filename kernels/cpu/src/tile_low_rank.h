// Low-rank updates in bf16 by tile registers: both products of an adapter, for any number of rows.
//
// A x is rounded to bf16 before it is multiplied by B. A row's update has the same bits whatever
// other rows there are.
#pragma once

#include "linear.h"

namespace remora {

#if REMORA_TILES

// As `shrink`, for 16 ranks at most.
void shrink_by_tiles(const LowRank& low, const AdapterRows::Block& block, int part, int first,
                     int last, const void* x, bool x_is_bf16, int64_t x_stride, uint64_t stage);

// Arrange A x of rows [first, last) for `expand_by_tiles`; nothing to do while `stage` is the same.
void arrange_shrunk(const Updates& updates, int first, int last, uint64_t stage);

// Add updates to the sums [rows][64] of a block of up to 16 rows from `row` on, one of those
// that `arrange_shrunk` began; `columns` of a panel are computed. Tile registers are configured for
// operands of 64 bytes and at least so many rows.
// stage: a number for the present contents of A x and B; while it stays the same, a thread arranges
//        them once
void expand_by_tiles(const Updates& updates, const Columns& columns, int row, int num_rows,
                     uint64_t stage, float* sums);

#endif

}  // namespace remora
