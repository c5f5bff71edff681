// Products of grouped weights with a few rows by vectors, from the layout that tiles read.
//
// A tile instruction takes as long for one row as for sixteen, and codes of less than a byte must be
// unpacked to memory first. Vectors multiply them in registers. Sums of a group are whole numbers and
// exact, and are scaled and added as by tiles: the result has the same bits.
#pragma once

#include "dot.h"
#include "grouped.h"

namespace remora {

constexpr int FEW_ROWS = 4;

// Bytes between codes and their prefetch into the first-level cache.
constexpr int CODES_AHEAD = 2048;

// A group's codes as u8, and the code of zero. Whole bytes are stored as s8.
template <class Codes>
struct Unsigned {
  static constexpr bool IS_SIGNED = Codes::STEPS == 1 && Codes::ZERO == 0;
  static constexpr int ZERO = IS_SIGNED ? 128 : Codes::ZERO;

  template <class Word>
  static INLINE ri step(int step, Word&& word) {
    const ri codes = Codes::step(step, word);
    return IS_SIGNED ? codes ^ (int32_t)0x80808080 : codes;
  }
};

// The rows of a group: codes [MR][Group::SIZE], scales [MR], and sums of the codes, which are whole.
struct GroupRows {
  const char* codes;
  const float *scales, *sums;
};

// sums[row][64] += the product of MR rows with a group of a panel.
template <class Group, int MR>
INLINE void add_few_rows(const char* panel, int group, const GroupRows& rows, float* sums) {
  typedef Unsigned<typename Group::Codes> Codes;
  constexpr int STEPS = Group::Codes::STEPS, WORDS = Group::Codes::WORDS;
  constexpr int N = PANEL_VECTORS * PARTS, OF_VECTOR = Group::GROUP_BYTES / PANEL_VECTORS;
  const char* codes = Group::codes_of(panel, group);
  UNROLL for (int at = 0; at < Group::GROUP_BYTES; at += 64)
    __builtin_prefetch(codes + CODES_AHEAD + at);
  ri acc[MR][N];
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int v = 0; v < N; v++)
      acc[r][v] = spread((U8_ZERO - Codes::ZERO) * (int32_t)rows.sums[r]);
  for (int first = 0; first < Group::SIZE / 4; first += STEPS, codes += WORDS * 64)
    UNROLL for (int step = 0; step < STEPS; step++) {
      ri column[N];
      UNROLL for (int v = 0; v < N; v++)
        column[v] = Codes::step(step, [&](int word) {
          return load<ri>(codes + v / PARTS * OF_VECTOR + word * 64 + v % PARTS * REGISTER);
        });
      UNROLL for (int r = 0; r < MR; r++) {
        const ri value = spread_word(rows.codes + r * Group::SIZE + (first + step) * 4);
        UNROLL for (int v = 0; v < N; v++) acc[r][v] = dot_u8s8(acc[r][v], column[v], value);
      }
    }
  const char* block = Group::block_of(panel, group);
  UNROLL for (int v = 0; v < N; v++) {
    const int column = v * REGISTER_LANES;
    const typename Group::Scales::template Of<rf> of_columns(block, group % Group::GROUPS, column);
    UNROLL for (int r = 0; r < MR; r++) {
      float* at = sums + r * PANEL + column;
      const rf product = of_columns.scaled(to_float(acc[r][v]), rows.sums[r]);
      store(at, fma(product, spread(rows.scales[r]), load<rf>(at)));
    }
  }
}

}  // namespace remora
