// Grouped formats: whole numbers with scales for groups of k, multiplied with rows of int8.
//
// A format consists of codes and scales. Its block is the smallest piece of k of a panel that contains
// its own scales: first the scales of 64 columns, then of each of its groups the levels, if it has
// them, and the codes. A product reads all of it in this order, as CPUs read ahead only in order: with
// levels before all codes, and with upper bits behind lower ones, one core of Zen 4 read 10 instead of
// 30 GB/s. Rows have a scale for each group, too:
//
//   sum over groups of  scaled(sum of code * row code, sum of row codes) * scale of the row
//
// Codes say how the whole numbers of columns are stored, and are read by vectors or as a tile of 16
// columns. Scales are read by vectors of either width, V. A new format is an
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

// Numbers of a plain format as floats.
template <class V, class Number>
INLINE V widened(const Number* from) {
  if constexpr (std::is_same_v<Number, bf16>)
    return widen(load<typename HalfOf<V>::type>(from));
  else if constexpr (std::is_same_v<Number, f16>)
    return widen_f16(load<typename HalfOf<V>::type>(from));
  else
    return load<V>(from);
}

// Codes
//
// A step is four k of each column. Codes of STEPS steps consist of WORDS words of 32 bits for each
// column: byte i of every word belongs to k = i of each step. `step` returns the codes of one step as
// u8, at most MOST; `word` loads a word of all columns. A code stands for its difference from ZERO.

// One byte a code. By vectors they are u8 with 128 for zero, in tiles s8.
struct Bytes {
  static constexpr int STEPS = 1, WORDS = 1, ZERO = HAS_TILES ? 0 : 128, MOST = 255;

  template <class Word>
  static INLINE auto step(int, Word&& word) {
    return word(0);
  }
};

template <int FIRST = 0, class Word>
INLINE auto nibbles(int step, Word&& word) {
  const auto both = word(FIRST + step / 2);
  return (step % 2 ? both >> 4 : both) & 0x0f0f0f0f;
}

// Two codes a byte: the low bits are those of the first step.
template <int ZERO_>
struct Nibbles {
  static constexpr int STEPS = 2, WORDS = 1, ZERO = ZERO_, MOST = 15;

  template <class Word>
  static INLINE auto step(int step, Word&& word) {
    return nibbles(step, word);
  }
};

// Four codes a byte: bits 2 s and 2 s + 1 are those of step s.
struct TwoBits {
  static constexpr int STEPS = 4, WORDS = 1, ZERO = 0, MOST = 3;

  template <class Word>
  static INLINE auto step(int step, Word&& word) {
    return (word(0) >> (2 * step)) & 0x03030303;
  }
};

// The fifth bits, of which bit s of a byte is that of step s; then nibbles.
template <int ZERO_>
struct FiveBits {
  static constexpr int STEPS = 8, WORDS = 5, ZERO = ZERO_, MOST = 31;

  template <class Word>
  static INLINE auto step(int step, Word&& word) {
    const auto bits = word(0);
    return nibbles<1>(step, word) | ((step < 4 ? bits << (4 - step) : bits >> (step - 4)) & 0x10101010);
  }
};

// The upper two bits, of which 2 s and 2 s + 1 of a byte are those of step s; then nibbles.
struct SixBits {
  static constexpr int STEPS = 4, WORDS = 3, ZERO = 32, MOST = 63;

  template <class Word>
  static INLINE auto step(int step, Word&& word) {
    const auto bits = word(0);
    return nibbles<1>(step, word) |
           ((step < 2 ? bits << (4 - 2 * step) : bits >> (2 * step - 4)) & 0x30303030);
  }
};

// Numbers of a table of 16 bytes, at places below 16.
typedef uint8_t Table __attribute__((vector_size(16)));

INLINE ri looked_up(Table table, ri places) {
#if defined(__AVX512BW__)
  return (ri)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)places);
#elif defined(__AVX2__)
  return (ri)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)places);
#elif defined(__aarch64__)
  return (ri)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
  typedef uint8_t Bytes __attribute__((vector_size(REGISTER)));
  Bytes numbers;
  for (int i = 0; i < REGISTER; i++) numbers[i] = table[((Bytes)places)[i]];
  return (ri)numbers;
#endif
}

#if !defined(__AVX512F__)
INLINE vi looked_up(Table table, vi places) {
  vi numbers;
  UNROLL for (int part = 0; part < PARTS; part++)
    store((char*)&numbers + part * REGISTER,
          looked_up(table, load<ri>((const char*)&places + part * REGISTER)));
  return numbers;
}
#endif

// Nibbles that are places in a table of codes.
template <class Places>
struct TabledNibbles {
  static constexpr int STEPS = 2, WORDS = 1, ZERO = Places::ZERO, MOST = Places::MOST;

  template <class Word>
  static INLINE auto step(int step, Word&& word) {
    return looked_up(Places::TABLE, nibbles(step, word));
  }
};

// Numbers of e2m1; doubled, they are whole.
struct Float4 {
  static constexpr int ZERO = 12, MOST = 24;
  static constexpr Table TABLE = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

// The levels of GGUF's IQ4 formats, denser around 0.
struct Levels4 {
  static constexpr int ZERO = 128, MOST = 241;
  static constexpr Table TABLE = {1,   24,  45,  63,  79,  93,  106, 118,
                                  129, 141, 153, 166, 181, 197, 217, 241};
};

// The tile of 16 columns whose codes are stored at some address.
struct StoredTile {
  const char* at;
  INLINE void take(const char* from) { at = from; }
  const char* data() const { return at; }
};

template <class Codes, int SIZE>
struct UnpackedTile {
  alignas(64) char bytes[SIZE * LANES];

  INLINE void take(const char* from) {
    for (char* to = bytes; to < bytes + SIZE * LANES; from += Codes::WORDS * 64)
      UNROLL for (int step = 0; step < Codes::STEPS; step++, to += 64) {
        const vi codes = Codes::step(step, [&](int word) { return load<vi>(from + word * 64); });
        store(to, (vbytes)codes - (int8_t)Codes::ZERO);
      }
  }
  const char* data() const { return bytes; }
};

// Scales

// w = scale * code; a number for each block.
template <class Number>
struct Scaled {
  static constexpr int BYTES = sizeof(Number) * PANEL;  // of a block
  static constexpr int LEVEL_BYTES = 0;                 // of a group

  template <class V>
  struct Of {
    V scale;
    // Of a group with these levels, for columns from `column` on.
    INLINE Of(const char* block, const char*, int column)
        : scale(widened<V>((const Number*)block + column)) {}
    INLINE V scaled(V dot, float) const { return dot * scale; }
  };
};

// w = scale * (code - zero); a number and an s8 for each block. The difference is exact.
template <class Number>
struct ScaledFromZero {
  static constexpr int BYTES = (sizeof(Number) + 1) * PANEL, LEVEL_BYTES = 0;

  template <class V>
  struct Of {
    V scale, zero;
    INLINE Of(const char* block, const char*, int column)
        : scale(widened<V>((const Number*)block + column)),
          zero(floats_of<V>((const int8_t*)block + sizeof(Number) * PANEL + column)) {}
    INLINE V scaled(V dot, float sum) const { return (dot - zero * sum) * scale; }
  };
};

// w = scale * code + least; two bf16 for each group.
struct ScaledFromLeast {
  static constexpr int BYTES = 4 * PANEL, LEVEL_BYTES = 0;

  template <class V>
  struct Of {
    V scale, least;
    INLINE Of(const char* block, const char*, int column)
        : scale(widened<V>((const bf16*)block + column)),
          least(widened<V>((const bf16*)block + PANEL + column)) {}
    INLINE V scaled(V dot, float sum) const { return fma_to_product(dot, scale, least * sum); }
  };
};

// w = scale * code - least; two f16 for each group.
struct ScaledFromLeastF16 {
  static constexpr int BYTES = 4 * PANEL, LEVEL_BYTES = 0;

  template <class V>
  struct Of {
    V scale, least;
    INLINE Of(const char* block, const char*, int column)
        : scale(widened<V>((const f16*)block + column)),
          least(-widened<V>((const f16*)block + PANEL + column)) {}
    INLINE V scaled(V dot, float sum) const { return fma_to_product(dot, scale, least * sum); }
  };
};

// w = scale * code; the exponent of a float, whose other bits are 0, for each group.
struct ScaledByPower {
  static constexpr int BYTES = PANEL, LEVEL_BYTES = 0;

  template <class V>
  struct Of {
    V scale;
    INLINE Of(const char* block, const char*, int column)
        : scale((V)(words_of<V>((const uint8_t*)block + column) << 23)) {}
    INLINE V scaled(V dot, float) const { return dot * scale; }
  };
};

// w = scale * level * code; an f16 for each block, an s8 for each group.
struct Levels {
  static constexpr int BYTES = 2 * PANEL, LEVEL_BYTES = PANEL;

  template <class V>
  struct Of {
    V scale;
    INLINE Of(const char* block, const char* levels, int column)
        : scale(widened<V>((const f16*)block + column) *
                floats_of<V>((const int8_t*)levels + column)) {}
    INLINE V scaled(V dot, float) const { return dot * scale; }
  };
};

// w = scale * level * code - least * level of least; two f16 for each block, two u8 for each group.
struct LevelsFromLeast {
  static constexpr int BYTES = 4 * PANEL, LEVEL_BYTES = 2 * PANEL;

  template <class V>
  struct Of {
    V scale, least;
    INLINE Of(const char* block, const char* levels, int column) {
      const uint8_t* level = (const uint8_t*)levels + column;
      scale = widened<V>((const f16*)block + column) * floats_of<V>(level);
      least = widened<V>((const f16*)block + PANEL + column) * -floats_of<V>(level + PANEL);
    }
    INLINE V scaled(V dot, float sum) const { return fma_to_product(dot, scale, least * sum); }
  };
};

// SIZE_ k of a group, GROUPS_ groups of a block.
template <class Codes_, class Scales_, int SIZE_, int GROUPS_ = 1>
struct Grouped {
  typedef Codes_ Codes;
  typedef Scales_ Scales;
  typedef std::conditional_t<Codes::STEPS == 1, StoredTile, UnpackedTile<Codes, SIZE_>> Tile;
  static constexpr int SIZE = SIZE_, GROUPS = GROUPS_, BLOCK = SIZE * GROUPS;
  static constexpr int GROUP_BYTES = SIZE * PANEL * Codes::WORDS / Codes::STEPS;  // of codes
  static constexpr int STRIDE = Scales::LEVEL_BYTES + GROUP_BYTES;
  static constexpr int BYTES = Scales::BYTES + GROUPS * STRIDE;  // of a block

  static INLINE const char* block_of(const char* panel, int group) {
    return panel + (int64_t)(group / GROUPS) * BYTES;
  }
  static INLINE const char* levels_of(const char* panel, int group) {
    return block_of(panel, group) + Scales::BYTES + group % GROUPS * STRIDE;
  }
  static INLINE const char* codes_of(const char* panel, int group) {
    return levels_of(panel, group) + Scales::LEVEL_BYTES;
  }
  // Scales of columns from `column` on.
  template <class V>
  static INLINE typename Scales::template Of<V> scales_of(const char* panel, int group, int column) {
    return {block_of(panel, group), levels_of(panel, group), column};
  }
};

typedef Grouped<Bytes, Scaled<bf16>, 64> GroupedQ8;
typedef Grouped<Nibbles<0>, ScaledFromLeast, 32> GroupedQ4;
typedef Grouped<Nibbles<8>, Scaled<f16>, 64, 2> GroupedI4_128;
typedef Grouped<Nibbles<0>, ScaledFromZero<f16>, 32> GroupedI4Z_32;
typedef Grouped<Nibbles<0>, ScaledFromZero<f16>, 64> GroupedI4Z_64;
typedef Grouped<Nibbles<0>, ScaledFromZero<f16>, 64, 2> GroupedI4Z_128;
typedef Grouped<Bytes, Scaled<float>, 64, 2> GroupedI8_128;
typedef Grouped<Bytes, ScaledFromZero<f16>, 64> GroupedI8Z_64;
typedef Grouped<Bytes, ScaledFromZero<f16>, 32> GroupedI8Z_32;
typedef Grouped<Nibbles<8>, Scaled<f16>, 32> GroupedQ4_0;
typedef Grouped<Nibbles<0>, ScaledFromLeastF16, 32> GroupedQ4_1;
typedef Grouped<FiveBits<16>, Scaled<f16>, 32> GroupedQ5_0;
typedef Grouped<FiveBits<0>, ScaledFromLeastF16, 32> GroupedQ5_1;
typedef Grouped<Bytes, Scaled<f16>, 32> GroupedQ8_0;
typedef Grouped<TwoBits, LevelsFromLeast, 16, 16> GroupedQ2_K;
typedef Grouped<Nibbles<4>, Levels, 16, 16> GroupedQ3_K;  // codes of three bits
typedef Grouped<Nibbles<0>, LevelsFromLeast, 32, 8> GroupedQ4_K;
typedef Grouped<FiveBits<0>, LevelsFromLeast, 32, 8> GroupedQ5_K;
typedef Grouped<SixBits, Levels, 16, 16> GroupedQ6_K;
typedef Grouped<TabledNibbles<Levels4>, Scaled<f16>, 32> GroupedIQ4_NL;
typedef Grouped<TabledNibbles<Levels4>, Levels, 32, 8> GroupedIQ4_XS;
typedef Grouped<TabledNibbles<Float4>, ScaledByPower, 32> GroupedMXFP4;

// Call `body` with a grouped format's type.
template <class Body>
INLINE auto with_grouped(Format format, Body&& body) {
  switch (format) {
    case Q8: return body(GroupedQ8{});
    case I4_128: return body(GroupedI4_128{});
    case I4Z_32: return body(GroupedI4Z_32{});
    case I4Z_64: return body(GroupedI4Z_64{});
    case I4Z_128: return body(GroupedI4Z_128{});
    case I8_128: return body(GroupedI8_128{});
    case I8Z_64: return body(GroupedI8Z_64{});
    case I8Z_32: return body(GroupedI8Z_32{});
    case Q4_0: return body(GroupedQ4_0{});
    case Q4_1: return body(GroupedQ4_1{});
    case Q5_0: return body(GroupedQ5_0{});
    case Q5_1: return body(GroupedQ5_1{});
    case Q8_0: return body(GroupedQ8_0{});
    case Q2_K: return body(GroupedQ2_K{});
    case Q3_K: return body(GroupedQ3_K{});
    case Q4_K: return body(GroupedQ4_K{});
    case Q5_K: return body(GroupedQ5_K{});
    case Q6_K: return body(GroupedQ6_K{});
    case IQ4_NL: return body(GroupedIQ4_NL{});
    case IQ4_XS: return body(GroupedIQ4_XS{});
    case MXFP4: return body(GroupedMXFP4{});
    default: return body(GroupedQ4{});
  }
}

}  // namespace remora
