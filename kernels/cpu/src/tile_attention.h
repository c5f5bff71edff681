// Both products of attention by tile registers: of a partition with up to 32 rows, in bf16, or in bytes:
// K, V and queries are signed, weights unsigned.
//
// Scores and weights are rows of SCORES_STRIDE sums, floats or 32-bit integers, in the caller's memory; a
// row's weights overwrite the beginning of its scores. A product has the same bits for any number of rows.
//
// Knows nothing of softmax, masks, pages or scales.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace remora {

constexpr int SCORES_STRIDE = PARTITION_TOKENS + LANES;  // rows begin in different sets of the cache

// Numbers of a head are padded to 16; queries in bf16 to 32, because a tile is that deep.
template <class T>
constexpr int padded_query(int dim) {
  return HAS_TILES && sizeof(T) == 2 ? (dim + 31) / 32 * 32 : dim;
}

#if REMORA_TILES

template <class T>  // bf16 or int8_t
struct TileProducts {
  int dim, query_dim;  // of a head, padded
  int num_groups;      // of 16 positions; even
  const char* const* keys;  // [num_groups, up to a multiple of 4] K of each group
  int64_t half_bytes;       // from K to V

  // scores[row] = queries[row] . keys, for `count` rows of `query_dim`
  void score(const T* queries, int count, float* scores) const {
    TileUse use(TilePalette(depth() * (int)sizeof(T), std::min(TILE_SIDE, count)));
    if (count > TILE_SIDE)
      score_blocks<2>(queries, scores);
    else
      score_blocks<1>(queries, scores);
  }

  // out[row] = the sum of weights[row] * values, for `count` rows of `dim`. A tile of values is one
  // group, 16 deep: the next one may be in another page. In bytes, four groups may have been brought
  // together, one after the other.
  void add_values(const float* weights, int count, float* out, const char* together = nullptr) const {
    const int num_groups = together ? 4 : 1;
    TileUse use(TilePalette(num_groups * GROUP_TOKENS * (int)sizeof(T), std::min(TILE_SIDE, count)));
    if (count > TILE_SIDE)
      add_values_of_blocks<2>((const char*)weights, out, together);
    else
      add_values_of_blocks<1>((const char*)weights, out, together);
  }

 private:
  static constexpr int64_t STRIDE = SCORES_STRIDE * sizeof(float);

  // Numbers along k of a tile of K: the largest that divides a head.
  int depth() const {
    if constexpr (sizeof(T) == 2) return 32;
    return dim % 64 == 0 ? 64 : dim % 32 == 0 ? 32 : 16;
  }

  typedef std::conditional_t<sizeof(T) == 2, bf16, uint8_t> Weight;

  template <class Left, int SUM, int A, int B>
  static INLINE void dot() {
    if constexpr (std::is_same_v<Left, bf16>)
      dot_tiles_bf16<SUM, A, B>();
    else if constexpr (std::is_same_v<Left, int8_t>)
      dot_tiles_s8<SUM, A, B>();
    else
      dot_tiles_u8s8<SUM, A, B>();
  }

  // Scores of BLOCKS blocks of 16 rows: of four groups of positions at a time, or two.
  template <int BLOCKS>
  void score_blocks(const T* queries, float* all_scores) const {
    constexpr int GROUPS = 4 / BLOCKS;
    const int64_t stride = query_dim * sizeof(T);
    const int step = depth();
    for (int group = 0; group < num_groups; group += GROUPS) {
      zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
      for (int d = 0; d < query_dim; d += step) {
        const auto tile = [&](int g) { return keys[group + g] + d * GROUP_TOKENS * sizeof(T); };
        load_tile<LEFT>(queries + d, stride);
        load_tile<RIGHT>(tile(0), TILE_ROW_BYTES);
        dot<T, SUMS, LEFT, RIGHT>();
        load_tile<RIGHT + 1>(tile(1), TILE_ROW_BYTES);
        dot<T, SUMS + 1, LEFT, RIGHT + 1>();
        if constexpr (BLOCKS == 2) {
          load_tile<LEFT + 1>(queries + TILE_SIDE * query_dim + d, stride);
          dot<T, SUMS + 2, LEFT + 1, RIGHT>();
          dot<T, SUMS + 3, LEFT + 1, RIGHT + 1>();
        } else if (group + 2 < num_groups) {
          load_tile<RIGHT>(tile(2), TILE_ROW_BYTES);
          dot<T, SUMS + 2, LEFT, RIGHT>();
          load_tile<RIGHT + 1>(tile(3), TILE_ROW_BYTES);
          dot<T, SUMS + 3, LEFT, RIGHT + 1>();
        }
      }
      float* scores = all_scores + group * LANES;
      float* others = scores + (BLOCKS == 2 ? TILE_SIDE * SCORES_STRIDE : 2 * LANES);
      store_tile<SUMS>(scores, STRIDE), store_tile<SUMS + 1>(scores + LANES, STRIDE);
      if (BLOCKS == 1 && group + 2 >= num_groups) continue;
      store_tile<SUMS + 2>(others, STRIDE), store_tile<SUMS + 3>(others + LANES, STRIDE);
    }
  }

  // Products of the weights of BLOCKS blocks of rows with values, for four vectors of a head at a time,
  // or two.
  template <int BLOCKS>
  void add_values_of_blocks(const char* weights, float* all_out, const char* together) const {
    constexpr int VECTORS_TOGETHER = 4 / BLOCKS;
    const int64_t values_stride = dim * 4, out_stride = dim * sizeof(float);
    const int num_vectors = dim / LANES;
    for (int vector = 0; vector < num_vectors; vector += VECTORS_TOGETHER) {
      const int count = std::min(VECTORS_TOGETHER, num_vectors - vector);
      zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
      for (int group = 0; group < num_groups; group += together ? 4 : 1) {
        const int64_t at = group * GROUP_TOKENS * sizeof(T);
        const char* from = weights + at;
        const char* values = together ? together + at * dim : keys[group] + half_bytes;
        values += vector * TILE_ROW_BYTES;
        load_tile<LEFT>(from, STRIDE);
        load_tile<RIGHT>(values, values_stride);
        dot<Weight, SUMS, LEFT, RIGHT>();
        if (count > 1) {
          load_tile<RIGHT + 1>(values + TILE_ROW_BYTES, values_stride);
          dot<Weight, SUMS + 1, LEFT, RIGHT + 1>();
        }
        if constexpr (BLOCKS == 2) {
          load_tile<LEFT + 1>(from + TILE_SIDE * STRIDE, STRIDE);
          dot<Weight, SUMS + 2, LEFT + 1, RIGHT>();
          if (count > 1) dot<Weight, SUMS + 3, LEFT + 1, RIGHT + 1>();
        } else {
          if (count > 2) {
            load_tile<RIGHT>(values + 2 * TILE_ROW_BYTES, values_stride);
            dot<Weight, SUMS + 2, LEFT, RIGHT>();
          }
          if (count > 3) {
            load_tile<RIGHT + 1>(values + 3 * TILE_ROW_BYTES, values_stride);
            dot<Weight, SUMS + 3, LEFT, RIGHT + 1>();
          }
        }
      }
      float* out = all_out + vector * LANES;
      const auto put = [&]<int AT>(std::integral_constant<int, AT>) {
        const int block = AT / VECTORS_TOGETHER, v = AT % VECTORS_TOGETHER;
        if (v < count) store_tile<SUMS + AT>(out + block * TILE_SIDE * dim + v * LANES, out_stride);
      };
      put(std::integral_constant<int, 0>{}), put(std::integral_constant<int, 1>{});
      put(std::integral_constant<int, 2>{}), put(std::integral_constant<int, 3>{});
    }
  }
};

#endif

}  // namespace remora
