// Products of 8-bit floats by tile registers.
//
// A block of k is widened to tiles of bf16, which stay in the first-level cache while all rows are
// multiplied with them. Sums are those of tile products of bf16 (tile.h), scaled block by block.
#pragma once

#include <algorithm>

#include "float8.h"

#if REMORA_TILES

namespace remora {

// Rows: of a chunk, in the order in which tiles read them (tile_product.cpp).
template <class Rows>
class Float8Product {
 public:
  Float8Product(const char* panel, int padded_k, const Rows& rows)
      : panel_(panel), k_(padded_k), rows_(rows) {}

  // `sums` [16 rows of each block][64] += products of the panel. Tiles have 64 bytes of k.
  void run(float* sums) {
    const int num_blocks = rows_.num_blocks();
    for (int k = 0; k < k_; k += FLOAT8_BLOCK) {
      widen(float8_block(panel_, k) + FLOAT8_SCALES, tiles_from(k));
      for (int block = 0; block + 1 < num_blocks; block += 2)
        for (int vector = 0; vector < PANEL_VECTORS; vector += 2)
          add_products<2>(k, block, vector, sums);
      if (num_blocks % 2) add_products<1>(k, num_blocks - 1, 0, sums);
    }
  }

 private:
  static constexpr int TILE_K = TILE_ROW_BYTES / 2;
  static constexpr int STREAM_AHEAD = 4096;  // bytes between what is widened and what is prefetched

  int tiles_from(int k) const { return std::min(FLOAT8_BLOCK, k_ - k) / TILE_K; }

  void widen(const char* codes, int num_tiles) {
    char* to = wide_;
    for (int at = 0; at < num_tiles * PANEL_VECTORS * TILE_SIDE; at += 2) {
      __builtin_prefetch(codes + STREAM_AHEAD);
      UNROLL for (int i = 0; i < 2 * PARTS; i++, codes += REGISTER / 2, to += REGISTER)
        store(to, widen_e4m3(codes));
    }
  }

  // Of BLOCKS blocks of rows with 4 / BLOCKS vectors of columns: four tiles of sums.
  template <int BLOCKS>
  INLINE void add_products(int k, int block, int vector, float* sums) {
    constexpr int VECTORS = 4 / BLOCKS;
    const int x_step = rows_.tile_step(block), num_tiles = tiles_from(k);
    const char* x = rows_.tiles(block) + k / TILE_K * (int64_t)x_step;
    const char* w = wide_ + vector * TILE_BYTES;
    zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
    for (int at = 0; at < num_tiles; at++, x += x_step, w += PANEL_VECTORS * TILE_BYTES) {
      load_tile<LEFT>(x, TILE_ROW_BYTES);
      load_tile<RIGHT>(w, TILE_ROW_BYTES);
      dot_tiles_bf16<SUMS, LEFT, RIGHT>();
      load_tile<RIGHT + 1>(w + TILE_BYTES, TILE_ROW_BYTES);
      dot_tiles_bf16<SUMS + 1, LEFT, RIGHT + 1>();
      if constexpr (BLOCKS == 2) {
        load_tile<LEFT + 1>(x + TILE_BYTES, TILE_ROW_BYTES);
        dot_tiles_bf16<SUMS + 2, LEFT + 1, RIGHT>();
        dot_tiles_bf16<SUMS + 3, LEFT + 1, RIGHT + 1>();
      } else {
        load_tile<RIGHT>(w + 2 * TILE_BYTES, TILE_ROW_BYTES);
        dot_tiles_bf16<SUMS + 2, LEFT, RIGHT>();
        load_tile<RIGHT + 1>(w + 3 * TILE_BYTES, TILE_ROW_BYTES);
        dot_tiles_bf16<SUMS + 3, LEFT, RIGHT + 1>();
      }
    }
    store_tile<SUMS>(dots_[0], TILE_ROW_BYTES), store_tile<SUMS + 1>(dots_[1], TILE_ROW_BYTES);
    store_tile<SUMS + 2>(dots_[2], TILE_ROW_BYTES), store_tile<SUMS + 3>(dots_[3], TILE_ROW_BYTES);
    const float* scales = (const float*)float8_block(panel_, k) + vector * LANES;
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
  alignas(64) char wide_[FLOAT8_BLOCK / TILE_K * PANEL_VECTORS * TILE_BYTES];
  alignas(64) float dots_[4][TILE_SIDE][LANES];
};

}  // namespace remora

#endif
