// Grouped formats: whole numbers with scales for groups of k, multiplied with rows of int8.
//
// A format consists of codes and scales. Its block is the smallest piece of k of a panel that contains
// its own scales: first the scales of 64 columns, then the codes of each of its groups. Rows have a
// scale for each group, too:
//
//   sum over groups of  scaled(sum of code * row code, sum of row codes) * scale of the row
//
// Codes say how the whole numbers of 16 columns are stored, and are read by vectors (four k of each
// column at a time) or as a tile. Scales are read by vectors of either width, V. A new format is an
// alias below, a case of `with_grouped`, a member of Format, and its arrangement in
// `kernels/cpu/stored_layout.py`, unless pack.cpp rounds to it.
#pragma once

#include "format.h"
#include "tile.h"

namespace remora {

constexpr int PANEL = 64;
constexpr int PANEL_VECTORS = PANEL / LANES;

// Half as many bytes as V, as 16-bit numbers.
template <class V>
struct HalfOf;
template <>
struct HalfOf<vf> {
  typedef vuh type;
};
#if !defined(__AVX512F__)
template <>
struct HalfOf<rf> {
  typedef ruh type;
};
#endif

template <class V>
INLINE V bf16_scales(const char* from) {
  return widen(load<typename HalfOf<V>::type>(from));
}

// One byte a code. By vectors they are u8 with 128 for zero, in tiles s8.
struct Bytes {
  static constexpr int PER_BYTE = 1, ZERO = HAS_TILES ? 0 : 128;
  static constexpr int WORDS = 1;  // 32-bit words of codes in a word of memory

  static INLINE void unpack(ri stored, ri (&codes)[WORDS]) { codes[0] = stored; }

  // The tile of 16 columns whose codes are stored at `from`.
  template <int SIZE>
  struct Tile {
    const char* at;
    INLINE void take(const char* from) { at = from; }
    const char* data() const { return at; }
  };
};

// Two codes a byte: of eight k, the low bits hold the first four and the high bits the others.
struct Nibbles {
  static constexpr int PER_BYTE = 2, ZERO = 0;
  static constexpr int WORDS = 2;

  static INLINE void unpack(ri stored, ri (&codes)[WORDS]) {
    codes[0] = stored & 0x0f0f0f0f;
    codes[1] = (stored >> 4) & 0x0f0f0f0f;
  }

  template <int SIZE>
  struct Tile {
    alignas(64) char bytes[SIZE * LANES];
    INLINE void take(const char* from) {
      UNROLL for (int at = 0; at < SIZE * LANES; at += 128) {
        const vi both = load<vi>(from + at / 2);
        store(bytes + at, both & 0x0f0f0f0f);
        store(bytes + at + 64, (both >> 4) & 0x0f0f0f0f);
      }
    }
    const char* data() const { return bytes; }
  };
};

// w = scale * code; a bf16 for each group.
struct Scaled {
  static constexpr int BYTES = 2 * PANEL;  // of a block

  template <class V>
  struct Of {
    V scale;
    // Of group `group` of a block, for columns from `column` on.
    INLINE Of(const char* block, int, int column) : scale(bf16_scales<V>(block + column * 2)) {}
    INLINE V scaled(V dot, float) const { return dot * scale; }
  };
};

// w = scale * code + least; two bf16 for each group.
struct ScaledFromLeast {
  static constexpr int BYTES = 4 * PANEL;

  template <class V>
  struct Of {
    V scale, least;
    INLINE Of(const char* block, int, int column)
        : scale(bf16_scales<V>(block + column * 2)),
          least(bf16_scales<V>(block + column * 2 + 2 * PANEL)) {}
    INLINE V scaled(V dot, float sum) const { return fma(dot, scale, least * sum); }
  };
};

// SIZE_ k of a group, GROUPS_ groups of a block.
template <class Codes_, class Scales_, int SIZE_, int GROUPS_ = 1>
struct Grouped {
  typedef Codes_ Codes;
  typedef Scales_ Scales;
  static constexpr int SIZE = SIZE_, GROUPS = GROUPS_, BLOCK = SIZE * GROUPS;
  static constexpr int GROUP_BYTES = SIZE * PANEL / Codes::PER_BYTE;  // of codes
  static constexpr int BYTES = Scales::BYTES + GROUPS * GROUP_BYTES;  // of a block

  static INLINE const char* block_of(const char* panel, int group) {
    return panel + (int64_t)(group / GROUPS) * BYTES;
  }
  static INLINE const char* codes_of(const char* panel, int group) {
    return block_of(panel, group) + Scales::BYTES + group % GROUPS * GROUP_BYTES;
  }
};

typedef Grouped<Bytes, Scaled, 64> GroupedQ8;
typedef Grouped<Nibbles, ScaledFromLeast, 32> GroupedQ4;

// Call `body` with a grouped format's type.
template <class Body>
INLINE auto with_grouped(Format format, Body&& body) {
  switch (format) {
    case Q8: return body(GroupedQ8{});
    default: return body(GroupedQ4{});
  }
}

}  // namespace remora
