// Products of grouped weights with a few rows, by vectors.
//
// Codes are unpacked in registers. Sums of a group are whole numbers and exact, whatever the order;
// they are scaled and added group by group, as tiles add them: both have the same bits.
#pragma once

#include <algorithm>
#include <bit>

#include "dot.h"
#include "linear.h"

namespace remora {

// Steps of a group whose products are added in 16 bits before they are widened; 0 = they are not.
template <class Group>
constexpr int narrow_steps() {
  constexpr int FIT = HAS_BYTE_PAIRS ? 32767 / (2 * 127 * Group::Codes::MOST) : 0;
  return std::min((int)std::bit_floor((unsigned)FIT), Group::SIZE / 4);
}

// Where a group's codes lie. With tile registers, those of 16 columns are adjacent (linear.h).
template <class Group>
struct CodePlaces {
  typedef typename Group::Codes Codes;
  // Bytes between words of a column, and of all words of STEPS steps.
  static constexpr int WORD = HAS_TILES ? LANES * 4 : PANEL * 4, STEPS = Codes::WORDS * WORD;
  // Tiles take whole bytes as s8; vectors take u8, but s8 where that is faster and
  // 16 bits do not hold their products.
  static constexpr bool ARE_SIGNED = HAS_TILES && Codes::STEPS == 1;
  static constexpr bool TAKES_SIGNED = HAS_SIGNED_PAIRS && narrow_steps<Group>() == 0;
  static constexpr bool FLIPS = ARE_SIGNED != TAKES_SIGNED;
  static constexpr int ZERO = Codes::ZERO + (ARE_SIGNED ? 128 : 0) - (TAKES_SIGNED ? 128 : 0);
  // Whether registers are wide enough for a core's own reads ahead, of one row at least.
  static constexpr bool READS_AHEAD = !HAS_TILES && PARTS == 1 && !HAS_BYTE_PAIRS;
  // Otherwise panels are prefetched so many bytes before they are used; 0 = they are not. Into the
  // first-level cache few lines can be on their way at a time, and products wait for them; the
  // second-level cache has room for more.
  static constexpr int AHEAD = HAS_TILES ? 2048 : Codes::STEPS > 1 || HAS_BYTE_PAIRS ? 24576 : 0;
  static constexpr int CACHE_LEVEL = HAS_TILES ? 1 : 2;

  // Of the columns of a register.
  static constexpr int of(int number) {
    constexpr int OF_VECTOR = HAS_TILES ? Group::GROUP_BYTES / PANEL_VECTORS : LANES * 4;
    return number / PARTS * OF_VECTOR + number % PARTS * REGISTER;
  }
};

template <int LEVEL>
INLINE void prefetch(const char* from, int num_bytes) {
  UNROLL for (int line = 0; line < num_bytes; line += 64) __builtin_prefetch(from + line, 0, 4 - LEVEL);
}

// Have what MR rows will read of a panel on its way, when they come to a group.
//
// A core reads ahead lines that are used in their order. Scales and levels lie before codes and are
// used after them: they are asked for first, and the order is kept. More rows of codes that are unpacked,
// and narrower registers, take so many instructions for a line that a core does not look far enough.
template <class Group, int MR>
INLINE void read_ahead(const char* panel, int group) {
  typedef CodePlaces<Group> Places;
  const char* block = Group::block_of(panel, group);
  if constexpr (Places::READS_AHEAD && (MR == 1 || Places::AHEAD == 0)) {
    if (group % Group::GROUPS == 0) prefetch<1>(block, Group::Scales::BYTES);
    prefetch<1>(Group::levels_of(panel, group), Group::Scales::LEVEL_BYTES);
  } else if constexpr (Places::AHEAD > 0) {
    constexpr int SHARE = Group::BYTES / Group::GROUPS;  // of a block, with scales
    prefetch<Places::CACHE_LEVEL>(block + group % Group::GROUPS * SHARE + Places::AHEAD, SHARE);
  }
}

// totals[r][v] += the product of row r of a group with the columns at registers [at, at + N).
template <class Group, int MR, int N>
INLINE void add_group(const char* panel, int group, int at, const int8_t* x, int stride,
                      const float* scales, const int32_t* sums, int groups, rf (&total)[MR][N]) {
  typedef typename Group::Codes Codes;
  typedef CodePlaces<Group> Places;
  ri acc[MR][N];
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int v = 0; v < N; v++)
      acc[r][v] = spread((U8_ZERO - Places::ZERO) * sums[r * groups]);
  const char* codes = Group::codes_of(panel, group) + Places::of(at);
  read_ahead<Group, MR>(panel, group);
  constexpr int NARROW = narrow_steps<Group>(), PIECE = std::max(Codes::STEPS, NARROW);
  rh pairs[MR][N] = {};
  const auto widen_pairs = [&] {
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int v = 0; v < N; v++) {
        acc[r][v] = add_neighbours(acc[r][v], (ri)pairs[r][v], spread(0x00010001));
        pairs[r][v] = rh{};
      }
  };
  // Unrolled by less, bytes of 64 k keep columns in memory instead of registers.
  _Pragma("GCC unroll 8") for (int piece = 0; piece < Group::SIZE / 4; piece += PIECE) {
    for (int first = piece; first < piece + PIECE; first += Codes::STEPS, codes += Places::STEPS)
      UNROLL for (int step = 0; step < Codes::STEPS; step++) {
        ri column[N];
        UNROLL for (int v = 0; v < N; v++) {
          column[v] = Codes::step(step, [&](int word) {
            return load<ri>(codes + word * Places::WORD + Places::of(v));
          });
          if constexpr (Places::FLIPS) column[v] ^= (int32_t)0x80808080;
        }
        UNROLL for (int r = 0; r < MR; r++) {
          const ri value = spread_word(x + (int64_t)r * stride + (first + step) * 4);
          UNROLL for (int v = 0; v < N; v++)
            if constexpr (NARROW > 0)
              pairs[r][v] = in_order(pairs[r][v] + multiply_pairs(column[v], value));
            else if constexpr (Places::TAKES_SIGNED)
              acc[r][v] = dot_s8s8(acc[r][v], column[v], value);
            else
              acc[r][v] = dot_u8s8(acc[r][v], column[v], value);
        }
        if constexpr (NARROW > 0 && NARROW < PIECE)
          if (step % NARROW == NARROW - 1) widen_pairs();
      }
    if constexpr (NARROW == PIECE) widen_pairs();
    // Keeps a compiler from loading later bytes first; a whole group of 64 k it leaves in order.
    if constexpr (MR > 1 && Codes::STEPS == 1 && Group::SIZE == 32) __asm__("" : "+r"(codes));
  }
  UNROLL for (int v = 0; v < N; v++) {
    const auto of_columns = Group::template scales_of<rf>(panel, group, (at + v) * REGISTER_LANES);
    UNROLL for (int r = 0; r < MR; r++)
      total[r][v] = fma(of_columns.scaled(to_float(acc[r][v]), (float)sums[r * groups]),
                        spread(scales[r * groups]), total[r][v]);
  }
}

// The same for all `count` groups, and rows from `row` on.
template <class Group, int MR, int N>
INLINE void add_groups(const char* panel, int count, int at, const Rows& x, int row,
                       rf (&total)[MR][N]) {
  const int groups = x.stride / Group::SIZE;
  const int8_t* rows = (const int8_t*)x.values + (int64_t)row * x.stride;
  const float* scales = x.scales + (int64_t)row * groups;
  const int32_t* sums = x.sums + (int64_t)row * groups;
  for (int group = 0; group < count; group++)
    add_group<Group>(panel, group, at, rows + group * Group::SIZE, x.stride, scales + group,
                     sums + group, groups, total);
}

}  // namespace remora
