// Low-rank updates of a weight, a slot for each adapter: y += B_s (A_s x), s the slot of the row.
//
// Rows are grouped by slot once a step. A_s x (shrink) is an operation of its own, which reads each
// A for all rows of its slot. B_s is multiplied (expand) by the product with the weight itself, while
// its sums are still in registers: a gated product has the update before the gate, and nothing is
// written twice. Rows without an adapter are not looked at.
//
// Either is summed in one order, whatever the rows: a row's result does not depend on its neighbours.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

namespace remora {

// The updates of a weight whose columns are parts, each with an A and a B of its own. Python writes
// to the slots between steps.
struct LowRank {
  const void* a;          // [slots][parts * max_rank][inputs]
  const void* b;          // [slots][outputs / COLUMNS][max_rank][COLUMNS], padded with zeros
  bool is_bf16;           // of a and b, which are float otherwise
  int inputs, outputs, num_parts, max_rank;
  const int32_t* ranks;   // [slots] in use, of every part
  const int32_t* bounds;  // [parts + 1] where the columns of each part begin
  float* shrunk;          // [rows][stride] A_s x: max_rank values of each part
  int stride;

  static constexpr int COLUMNS = 64;

  int part_of(int column) const;
  // Where B has rank 0 of a column; the next ranks follow COLUMNS apart.
  int64_t column_of_b(int slot, int column) const {
    const int64_t num_blocks = (outputs + COLUMNS - 1) / COLUMNS;
    const int64_t block = slot * num_blocks + column / COLUMNS;
    return block * max_rank * COLUMNS + column % COLUMNS;
  }
  float* shrunk_of(int64_t row, int part) const { return shrunk + row * stride + part * max_rank; }
};

// Which rows belong to which slot.
class AdapterRows {
 public:
  static constexpr int BLOCK = 32;

  // Rows of one slot.
  struct Block {
    int slot;  // counted from 0
    const int32_t* rows;
    int count;  // at most BLOCK
  };

  // adapters: of the tokens, counted from 1; tokens: the token of each row, null = its own number.
  void find(const int32_t* adapters, const int32_t* tokens, int num_rows);

  const std::vector<Block>& blocks() const { return blocks_; }  // none when no row has an adapter
  const int32_t* adapters() const { return adapters_.data(); }  // of each row
  const std::vector<int32_t>& rows() const { return rows_; }    // that have one, slot after slot

 private:
  std::vector<int32_t> adapters_, rows_;
  std::vector<Block> blocks_;
};

// low.shrunk[row][first, last) of a part = A_s x[row], for the rows of a block.
void shrink(const LowRank& low, const AdapterRows::Block& block, int part, int first, int last,
            const void* x, bool x_is_bf16, int64_t x_stride);

// low.shrunk[row] = the column `input` of A_s, all parts.
void shrink_one_hot(const LowRank& low, int adapter, int64_t row, int64_t input);

// What a product adds to its sums. Columns are those of the packed weight.
struct Updates {
  const LowRank& low;
  const int32_t* adapters;  // [rows] counted from 1; 0 = none
  bool is_gated;            // columns come as in a gated product: 16 of the first half, 16 of the second

  // Add those of rows [row, row + num_rows) to sums [num_rows][TILE_COLUMNS] that begin at `column`.
  void expand(int64_t row, int num_rows, int column, float* sums) const;
};

}  // namespace remora
