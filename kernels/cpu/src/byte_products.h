// Both products of attention with K and V in bytes by dot products of four bytes (VNNI): of a partition,
// with rows that are pairs of bytes. Operands and sums have the layout of tile_attention.h, and as sums of
// integers are exact, they have the same bits, for any number of rows.
//
// Knows nothing of softmax, masks or scales.
#pragma once

#include "dot.h"
#include "read_ahead.h"
#include "tile_attention.h"

namespace remora {

// Signed queries with K, which becomes unsigned: 128 is added to it.
struct StepByteKeys {
  typedef int8_t element;
  static constexpr int K = 4, BYTES = 64, ZEROS = (int32_t)0x80808080;
  static INLINE ri columns(const char* from) { return load<ri>(from) ^ ZEROS; }
  static INLINE rf add(rf acc, ri x, ri w) { return (rf)dot_u8s8((ri)acc, w, x); }
};

// Unsigned weights with V, which is signed.
struct StepByteValues {
  typedef uint8_t element;
  static constexpr int K = 4, BYTES = 64;
  static INLINE ri columns(const char* from) { return load<ri>(from); }
  static INLINE rf add(rf acc, ri x, ri w) { return (rf)dot_u8s8((ri)acc, x, w); }
};

struct ByteProducts {
  int dim;         // of a head, padded
  int num_groups;  // of 16 positions; a multiple of 4
  const char* const* keys;  // [num_groups] K of each group
  int64_t half_bytes;       // from K to V
  const ReadAhead& ahead;   // with the first rows

  // scores[row] = queries[row] . keys in 32-bit integers, for `count` rows of `dim`
  void score(const int8_t* queries, int count, float* scores) const {
    for (int row = 0; row < count; row += TILE_ROWS)
      with_rows<TILE_ROWS>(std::min(count - row, TILE_ROWS), [&](auto rows) {
        score_rows<decltype(rows)::value>(queries + row * dim, scores + row * SCORES_STRIDE, row == 0);
      });
  }

  // out[row] = the sum of weights[row] * values, for `count` rows of `dim`
  void add_values(const float* weights, int count, float* out) const {
    const int vectors = dim / LANES;
    for (int row = 0; row < count; row += TILE_ROWS)
      with_rows<TILE_ROWS>(std::min(count - row, TILE_ROWS), [&](auto rows) {
        constexpr int MR = decltype(rows)::value;
        const uint8_t* from = (const uint8_t*)(weights + row * SCORES_STRIDE);
        int v = 0;
        for (; v + TILE_VECTORS <= vectors; v += TILE_VECTORS)
          add_vectors<MR, TILE_VECTORS>(from, v, out + row * dim, row + v == 0);
        for (; v < vectors; v++) add_vectors<MR, 1>(from, v, out + row * dim, row + v == 0);
      });
  }

 private:
  template <int MR>
  void score_rows(const int8_t* queries, float* scores, bool reads_ahead) const {
    const ri zeros = spread(StepByteKeys::ZEROS);
    vf start[MR];
    UNROLL for (int r = 0; r < MR; r++) {
      ri excess = {};
      for (int d = 0; d < dim; d += StepByteKeys::K)
        excess = dot_u8s8(excess, zeros, spread_word(queries + r * dim + d));
      UNROLL for (int part = 0; part < PARTS; part++)
        store((char*)&start[r] + part * REGISTER, -excess);
    }
    for (int group = 0; group < num_groups; group += TILE_VECTORS) {
      if (reads_ahead)
        for (int i = 0; i < TILE_VECTORS; i++) ahead.keys(group + i);
      vf sums[MR][TILE_VECTORS];
      UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = start[r];
      dot_columns<StepByteKeys, MR, TILE_VECTORS>(sums, queries, dim, keys + group,
                                                  StepByteKeys::BYTES, dim / StepByteKeys::K);
      UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++)
          store(scores + r * SCORES_STRIDE + (group + v) * LANES, sums[r][v]);
    }
  }

  template <int MR, int NV>
  void add_vectors(const uint8_t* weights, int vector, float* out, bool reads_ahead) const {
    constexpr int STRIDE = SCORES_STRIDE * sizeof(float);
    vf sums[MR][NV] = {};
    for (int group = 0; group < num_groups; group++) {
      if (reads_ahead) ahead.values(group);
      const char* columns[NV];
      UNROLL for (int v = 0; v < NV; v++)
        columns[v] = keys[group] + half_bytes + (vector + v) * StepByteValues::BYTES;
      dot_columns<StepByteValues, MR, NV>(sums, weights + group * GROUP_TOKENS, STRIDE, columns,
                                          (int64_t)dim * StepByteValues::K,
                                          GROUP_TOKENS / StepByteValues::K);
    }
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int v = 0; v < NV; v++) store(out + r * dim + (vector + v) * LANES, sums[r][v]);
  }
};

}  // namespace remora
