// How a product's rows and columns are divided into chunks.
//
// Few rows are bound by reading the weight: threads divide the columns, and the weight is read once.
// Many rows are bound by arithmetic: threads divide the rows, so that each multiplies rows that it
// has written; every thread then reads the whole weight, which is cheap per row. A sum is never
// divided, so results do not depend on the division.
//
// Panels are divided only if they are too few, because parts of them are not contiguous: one core of
// a Xeon (Sapphire Rapids) reads halves at 10 GB/s and vectors at 8, whole panels at 16.
#pragma once

#include <algorithm>

#include "linear.h"

namespace remora {

constexpr int ENOUGH_CHUNKS = 3;  // of a thread, to balance threads of different speed

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// First index of part `part` of `parts`.
inline int part_start(int size, int part, int parts) { return (int)((int64_t)size * part / parts); }

struct ProductChunk {
  Columns columns;
  int first, last;  // rows; empty if tiles are fewer than blocks
};

class Division {
 public:
  // num_panels: those of `weight` and of further weights of its shape
  // narrowest: fewest vectors of columns in a chunk
  Division(const Weight& weight, int num_panels, int narrowest, int num_rows, int num_threads)
      : num_panels_(num_panels), num_rows_(num_rows),
        packs_rows_(uses_tiles(weight.format)) {
    // Of a thread. Tiles multiply several times as fast. Unpacking codes takes long, and the rows of
    // a chunk share it.
    const int many_rows = packs_rows_ ? 128 : is_grouped(weight.format) ? 64 : 16;
    const int product_rows = packs_rows_ ? 256 : 192;  // of a chunk
    constexpr int WIDE_ROWS = 32;  // whose arithmetic takes as long as reading the weight
    if (num_rows >= many_rows * num_threads) {
      const int blocks = ceil_div(num_rows, product_rows * num_threads);  // of a thread
      blocks_ = num_threads * std::max(blocks, ceil_div(ENOUGH_CHUNKS, num_panels));
      keeps_rows_ = true;
      return;
    }
    const int wanted = ENOUGH_CHUNKS * num_threads;
    const auto missing = [&] { return ceil_div(wanted, num_panels_ * parts()); };
    blocks_ = std::clamp(missing(), 1, std::max(1, num_rows / WIDE_ROWS));
    while (vectors_ > narrowest && missing() > blocks_) vectors_ /= 2;
    blocks_ = std::max(blocks_, std::min(missing(), ceil_div(num_rows, tile_rows())));
    keeps_rows_ = packs_rows_;
  }

  int num_chunks() const { return num_rows_ == 0 ? 0 : num_panels_ * parts() * blocks_; }

  ProductChunk chunk(int number) const {
    const int num_columns = num_panels_ * parts();
    const int block = keeps_rows_ ? number / num_columns : number % blocks_;
    const int at = keeps_rows_ ? number % num_columns : number / blocks_;
    const int first = at % parts() * vectors_;
    return {{at / parts(), first, first + vectors_}, block_start(block), block_start(block + 1)};
  }

 private:
  int parts() const { return PANEL_VECTORS / vectors_; }  // of a panel
  int tile_rows() const { return packs_rows_ ? TILE_SIDE : TILE_ROWS; }
  // Blocks that are packed for tiles consist of whole tiles.
  int block_start(int block) const {
    const int unit = packs_rows_ ? TILE_SIDE : 1;
    return std::min(num_rows_, part_start(ceil_div(num_rows_, unit), block, blocks_) * unit);
  }

  const int num_panels_, num_rows_;
  const bool packs_rows_;  // each thread packs the rows of its chunk for tiles
  int blocks_ = 1;         // of rows
  int vectors_ = PANEL_VECTORS;
  bool keeps_rows_ = false;  // from one chunk to the next; otherwise it keeps columns
};

}  // namespace remora
