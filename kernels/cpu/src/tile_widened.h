// Products of widened formats (widened.h) by tile registers.
//
// A block of k is widened to tiles of bf16, which stay in the first-level cache while all rows are
// multiplied with them. Sums are those of tile products of bf16 (tile.h), scaled block by block.
#pragma once

#include <algorithm>

#include "widened.h"

#if REMORA_TILES

namespace remora {

// Rows: of a chunk, in the order in which tiles read them (tile_product.cpp).
template <class Codes, class Rows>
class WidenedProduct {
 public:
  WidenedProduct(const char* panel, int padded_k, const Rows& rows)
      : panel_(panel), k_(padded_k), rows_(rows), codes_(panel) {}

  // `sums` [16 rows of each block][64] += products of the panel.
  void run(float* sums) {
    if (rows_.num_blocks() == 1) return run_block(sums);
    for (int k = 0; k < k_; k += Codes::BLOCK) {
      const int num_tiles = std::min(Codes::BLOCK, k_ - k) / TILE_K;
      for (int at = 0; at < num_tiles; at++) widen(k + at * TILE_K, at);
      int block = 0;
      for (; block + 1 < rows_.num_blocks(); block += 2)
        for (int vector = 0; vector < PANEL_VECTORS; vector += 2) {
          zero_sums();
          for (int at = 0; at < num_tiles; at++) multiply<2>(k + at * TILE_K, at, block, vector);
          add_sums<2>(k, block, vector, sums);
        }
      if (block == rows_.num_blocks()) continue;
      zero_sums();
      for (int at = 0; at < num_tiles; at++) multiply<1>(k + at * TILE_K, at, block, 0);
      add_sums<1>(k, block, 0, sums);
    }
  }

 private:
  static constexpr int TILE_K = TILE_ROW_BYTES / 2;
  static constexpr int STREAM_AHEAD = 4096;  // bytes between what is widened and what is prefetched

  // The next columns are widened while tiles multiply.
  void run_block(float* sums) {
    widen(0, 0);
    for (int k = 0, at = 0; k < k_; k += TILE_K, at ^= 1) {
      if (k % Codes::BLOCK == 0) zero_sums();
      multiply<1>(k, at, 0, 0);
      const int next = k + TILE_K;
      if (next < k_) widen(next, at ^ 1);
      if (next == k_ || next % Codes::BLOCK == 0)
        add_sums<1>(k / Codes::BLOCK * Codes::BLOCK, 0, 0, sums);
    }
  }

  // Columns [k, k + 32) become the tiles [4 vectors] at `at`.
  void widen(int k, int at) {
    constexpr int OF_K = Codes::PAIR * PANEL, OF_REGISTER = Codes::PAIR * REGISTER_LANES;  // bytes
    const Codes codes = codes_;
    const char* from = widened_block<Codes>(panel_, k) + BLOCK_SCALES + k % Codes::BLOCK / 2 * OF_K;
    char* to = wide_[at];
    for (int line = 0; line < TILE_K / 2 * OF_K; line += 64) {
      __builtin_prefetch(from + STREAM_AHEAD);
      UNROLL for (int i = 0; i < 64 / OF_REGISTER; i++, from += OF_REGISTER, to += REGISTER)
        store(to, codes.widen(from));
    }
  }

  INLINE void zero_sums() {
    zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
  }

  // Four tiles of sums: BLOCKS blocks of rows with 4 / BLOCKS vectors of columns.
  template <int BLOCKS>
  INLINE void multiply(int k, int at, int block, int vector) {
    const char* x = rows_.tiles(block) + k / TILE_K * (int64_t)rows_.tile_step(block);
    const char* w = wide_[at] + vector * TILE_BYTES;
    dot_blocks<BLOCKS>(x, w);
    if constexpr (BLOCKS == 1) {
      load_tile<RIGHT>(w + 2 * TILE_BYTES, TILE_ROW_BYTES);
      dot_tiles_bf16<SUMS + 2, LEFT, RIGHT>();
      load_tile<RIGHT + 1>(w + 3 * TILE_BYTES, TILE_ROW_BYTES);
      dot_tiles_bf16<SUMS + 3, LEFT, RIGHT + 1>();
    }
  }

  // Add the sums of the block of k, scaled.
  template <int BLOCKS>
  INLINE void add_sums(int k, int block, int vector, float* sums) {
    constexpr int VECTORS = 4 / BLOCKS;
    store_tile<SUMS>(dots_[0], TILE_ROW_BYTES), store_tile<SUMS + 1>(dots_[1], TILE_ROW_BYTES);
    store_tile<SUMS + 2>(dots_[2], TILE_ROW_BYTES), store_tile<SUMS + 3>(dots_[3], TILE_ROW_BYTES);
    const float* scales = (const float*)widened_block<Codes>(panel_, k) + vector * LANES;
    UNROLL for (int tile = 0; tile < 4; tile++) {
      const int below = tile / VECTORS, column = tile % VECTORS * LANES;
      const vf scale = load<vf>(scales + column);
      float* to = sums + (block + below) * TILE_SIDE * PANEL + vector * LANES + column;
      for (int r = 0; r < rows_.rows_of(block + below); r++, to += PANEL)
        store(to, fma(load<vf>(dots_[tile][r]), scale, load<vf>(to)));
    }
  }

  const char* panel_;
  const int k_;
  const Rows& rows_;
  const Codes codes_;
  alignas(64) char wide_[Codes::BLOCK / TILE_K][PANEL_VECTORS * TILE_BYTES];
  alignas(64) float dots_[4][TILE_SIDE][LANES];
};

}  // namespace remora

#endif
