// Products with packed weights: out = x W^T + bias, for any number of rows.
//
// A weight is packed in panels of 64 output columns. Values of a panel have the order in which a
// register tile reads them, so a product streams through memory once. Every output element is summed
// in one accumulator over ascending k in every tile: a row's result does not depend on other rows.
//
// Formats
//   F32   [k][64] float
//   BF16  [k / 2][64][2] bf16
//   F16   [k][64] f16; rows are F32
//   F8    per block of 128 k: scale [64] float, then [k / 2][64][2] e4m3 (widened.h); rows are BF16
//   T4    table [2][16] bf16; per block of 64 k: scale [64] float, then [k / 2][64] bytes, whose low
//         nibbles are places of the first k and whose high nibbles are those of the second (widened.h);
//         rows are BF16;  w = scale * table[place]
//   Q8    per group of 64 k: scale [64] bf16, then [k / 4][64][4] u8;  w = scale * (u - 128)
//   Q4    per group of 32 k: scale [64], least [64] bf16, then [k / 8][64][4] bytes, whose low
//         nibbles are the first four k and whose high nibbles are the next;  w = scale * u + least
//   I4    per block of k: scale [64] f16, then the codes of each group as in Q4;  w = scale * (u - 8)
//   I4Z   the same with zero [64] s8 after the scales;  w = scale * (u - zero)
//   I8    per block of k: scale [64] float, then the codes of each group as in Q8
//   I8Z   per block of k: scale [64] f16, zero [64] s8, then the codes of Q8;
//         w = scale * (u - 128 - zero)
//   Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS
//         blocks of GGUF, of 32 or 256 k: scales, then levels and codes of each group (grouped.h)
// Grouped formats (grouped.h; pack.cpp rounds to Q8, Q8_0, Q5_1 and Q4) quantise activations as
// well, per row and group of k: x = scale * s.
//
// With tile registers, the values of 16 columns that one tile holds are adjacent, and so are the tiles
// of 32 columns that a product of 16 bits reads together:
//   BF16  [2][k / 32][2][16 k / 2][16][2] bf16
//   F8    as above, but [k / 32][4][16 k / 2][16][2] e4m3
//   T4    as above, but [k / 32][4][16 k / 2][16] bytes
//   Q8    as above, but [4][16 k / 4][16][4] s8;  w = scale * s
//   Q4    as above, but [4][4 k / 8][16][4] bytes
#pragma once

#include "activation.h"
#include "grouped.h"
#include "low_rank.h"
#include "widened.h"

namespace remora {

// Whether products with a weight of this format use tile registers.
inline bool uses_tiles(Format format) {
  return HAS_TILES && (format == BF16 || is_widened(format) || is_grouped(format));
}

// k of a group of activations.
inline int group_size(Format format) {
  return with_grouped(format, [](auto grouped) { return decltype(grouped)::SIZE; });
}

// k of the smallest piece that a panel is made of.
inline int unit_of_k(Format format) {
  if (is_grouped(format))
    return with_grouped(format, [](auto grouped) { return decltype(grouped)::BLOCK; });
  return format != BF16 && !is_widened(format) ? 1 : HAS_TILES ? 32 : 2;
}

// k padded to whole units; padding of activations is 0.
inline int padded_k(Format format, int k) {
  const int unit = unit_of_k(format);
  return (k + unit - 1) / unit * unit;
}

inline int64_t panel_bytes(Format format, int k) {
  const int64_t kp = padded_k(format, k);
  if (is_widened(format))
    return with_widened(format, [&](auto codes) {
      return widened_panel_bytes<typename decltype(codes)::type>(kp);
    });
  if (is_grouped(format))
    return with_grouped(format, [&](auto grouped) {
      return kp / decltype(grouped)::BLOCK * decltype(grouped)::BYTES;
    });
  return kp * PANEL * number_bytes(format);
}

// Offset of a step of k (4 bytes) of one column in the values of a panel (BF16, `steps` is k / 2) or of
// one of its groups (Q8, Q4).
inline int64_t step_offset(Format format, int steps, int step, int column) {
  if (!HAS_TILES) return ((int64_t)step * PANEL + column) * 4;
  const int vector = column / LANES, lane = column % LANES;
  if (format != BF16) return (((int64_t)vector * steps + step) * LANES + lane) * 4;
  const int tile = step / TILE_SIDE, num_tiles = steps / TILE_SIDE;
  const int64_t place = ((int64_t)(vector / 2 * num_tiles + tile) * 2 + vector % 2) * TILE_BYTES;
  return place + (step % TILE_SIDE * LANES + lane) * 4;
}

struct Weight {
  Format format;
  int n, k;           // sizes in the model
  int num_panels;
  const char* data;   // [num_panels] of panel_bytes
  const float* bias;  // [num_panels * 64] or null
};

// Input rows of a product: float, bf16 or quantised. Strides in elements.
struct Rows {
  void* values;  // float, bf16 or int8 [rows][stride]
  int stride;
  float* scales;  // [rows][stride / group]; only quantised rows
  int32_t* sums;  // [rows][stride / group], of the int8 values
};

// How a product is stored.
enum Epilogue : int {
  STORE = 0,  // out[row][column] = activation(product)
  ADD = 1,    // out[row][column] += product
  GATED = 2,  // blocks of 16 columns, gate and up alternating: out = activation(gate) * up
};

struct Output {
  Epilogue epilogue;
  Activation activation;
  float limit;   // of CAP and GATES
  float sharpness, offset;  // of GATES
  bool is_bf16;  // only with an activation; otherwise float
  void* values;
  int stride;  // elements; room for whole panels (half panels when GATED)
};

// Columns of one chunk: vectors [first, last) of 16 columns of a panel. The number of vectors is
// a power of 2, and at least 2 when GATED.
struct Columns {
  int panel, first, last;
};

// A number for the present contents of some rows, different from all others.
uint64_t new_stage();

// Fewest vectors of columns for `multiply_panel`. Updates need whole register tiles; tile registers
// take the vectors that are adjacent.
inline int narrowest_columns(Format format, Epilogue epilogue, bool has_updates) {
  if (HAS_TILES && (is_widened(format) || is_grouped(format))) return PANEL_VECTORS;
  // Updates by tiles take the columns of a gated panel as a whole.
  if (has_updates) return HAS_TILES ? PANEL_VECTORS : TILE_VECTORS;
  return epilogue == GATED || (HAS_TILES && format == BF16) ? 2 : 1;
}

// Multiply rows [first, last) with columns of one panel.
// updates: what is added to the product before the epilogue, or null
// stage: of the rows' contents; while it stays the same, a thread packs rows for tiles only once
void multiply_panel(const Weight& weight, const Rows& x, const Output& out, const Columns& columns,
                    int first, int last, const Updates* updates, uint64_t stage);

// Fill panel `panel` of `to` from rows [n][k] of a plain format. With `gated`, the first n / 2 rows
// are the gate's and the others up's; their columns are packed alternately in blocks of 16.
void pack_panel(Format format, const void* from, Format source, int n, int k, bool gated, int panel,
                char* to);

// Return to the system the whole pages of the rows that make up this panel; their content is
// undefined afterwards.
void give_back_panel(const void* from, Format source, int n, int k, bool gated, int panel);

// Quantise one row of k floats into int8 groups.
void quantize_row(const float* x, int k, int group, int8_t* values, int padded, float* scales,
                  int32_t* sums);

}  // namespace remora
