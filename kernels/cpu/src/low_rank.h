// Low-rank updates of a weight, a slot for each adapter: y += B_s (A_s x), s the slot of the row.
//
// Rows are grouped by slot once per step. A_s x (shrink) is a separate operation that reads each A
// once for all rows of its slot. The product with the weight itself multiplies B_s (expand) while its
// sums are in registers, so a gated product applies the update before the gate and writes each output
// once. Rows without an adapter are skipped.
//
// Both sums have a fixed order: a row's result does not depend on other rows.
#pragma once

#include <cstdint>
#include <vector>

#include "format.h"

namespace remora {

// Updates of a weight whose columns form parts, each with its own A and B. Python writes to the slots
// between steps.
struct LowRank {
  const void* a;          // [slots][parts * max_rank][inputs]
  const void* b;          // [slots][num_blocks][max_rank][COLUMNS], padded with zeros
  Format format;          // of a and b
  int inputs, outputs, num_parts, max_rank, num_blocks;
  const int32_t* ranks;   // [slots] largest rank in use of any part
  const int32_t* bounds;  // [parts + 1] first column of each part; below 0 before the product's first
  float* shrunk;          // [rows][stride] A_s x: max_rank values of each part
  int stride;

  static constexpr int COLUMNS = 64;

  int part_of(int column) const;
  // Index of rank 0 of a column in B; further ranks follow at a distance of COLUMNS.
  int64_t column_of_b(int slot, int column) const {
    const int64_t block = (int64_t)slot * num_blocks + column / COLUMNS;
    return block * max_rank * COLUMNS + column % COLUMNS;
  }
  float* shrunk_of(int64_t row, int part) const { return shrunk + row * stride + part * max_rank; }
};

// Rows grouped by slot.
class AdapterRows {
 public:
  static constexpr int BLOCK = 64;

  // Rows of one slot.
  struct Block {
    int slot;  // counted from 0
    const int32_t* rows;
    int count;  // at most BLOCK
  };

  // adapters: of the tokens, counted from 1; tokens: of the rows, null = row r is token r.
  void find(const int32_t* adapters, const int32_t* tokens, int num_rows);

  const std::vector<Block>& blocks() const { return blocks_; }  // empty if no row has an adapter
  const int32_t* adapters() const { return adapters_.data(); }  // of each row
  const std::vector<int32_t>& rows() const { return rows_; }    // rows with an adapter, slot after slot

 private:
  std::vector<int32_t> adapters_, rows_;
  std::vector<Block> blocks_;
};

// low.shrunk[row][first, last) of a part = A_s x[row], for the rows of a block.
void shrink(const LowRank& low, const AdapterRows::Block& block, int part, int first, int last,
            const void* x, bool x_is_bf16, int64_t x_stride,
            uint64_t stage);

// low.shrunk[row] = the column `input` of A_s, all parts.
void shrink_one_hot(const LowRank& low, int adapter, int64_t row, int64_t input);

// Updates that a product adds to its sums. Columns are those of the packed weight.
struct Updates {
  const LowRank& low;
  const int32_t* adapters;  // [rows] counted from 1; 0 = none
  bool is_gated;            // gated product: columns alternate, 16 of each half

  // Add those of rows [row, row + num_rows) to sums [num_rows][TILE_COLUMNS] that begin at `column`.
  void expand(int64_t row, int num_rows, int column, float* sums) const;
};

}  // namespace remora
