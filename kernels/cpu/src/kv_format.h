// 8-bit formats of cached K and V: codes of numbers that are divided by the scale of their head.
//
// int8 and both formats of float8 widen exactly to bf16 and f16, so attention computes with widened
// codes as with unquantised K and V. Knows nothing of pages or heads.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "format.h"

namespace remora {

enum KvFormat : int { PLAIN = 0, INT8 = 1, E4M3 = 2, E5M2 = 3 };

// Codes are signed integers; rounding is to nearest, ties to even.
struct Int8Codes {
  static constexpr float GREATEST = 127.0f;
  static INLINE vi encode(vf x) { return round_to_int(x); }
  static INLINE vf decode(vi code) { return to_float(code); }
  static constexpr float magnitude(int code) { return (float)code; }
  static constexpr bool IS_FLOAT = false;
};

// Codes are a sign, an exponent with a bias, and MANTISSA bits.
template <int MANTISSA, int BIAS>
struct FloatCodes {
  static constexpr bool IS_FLOAT = true;
  static constexpr int SHIFT = 23 - MANTISSA, REBIAS = 127 - BIAS;
  static constexpr float power(int exponent) {
    return std::bit_cast<float>((uint32_t)(127 + exponent) << 23);
  }

  static INLINE vi encode(vf x) {
    const vi bits = float_to_bits(x), size = bits & 0x7fffffff;
    const vi odd = (size >> SHIFT) & 1;
    const vi normal = (size - (REBIAS << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT;
    const vf unit = splat(power(24 - BIAS - MANTISSA));  // its last bit is that of denormals
    const vi denormal = float_to_bits(bits_to_float(size) + unit) - float_to_bits(unit);
    return (size < (REBIAS + 1) << 23 ? denormal : normal) | (bits >> 24 & 0x80);
  }
  static INLINE vf decode(vi code) {
    const vf size = bits_to_float((code & 0x7f) << SHIFT) * power(REBIAS);  // denormals too
    return bits_to_float(float_to_bits(size) | (code & 0x80) << 24);
  }
  static constexpr float magnitude(int code) {
    const int exponent = code >> MANTISSA, mantissa = code & ((1 << MANTISSA) - 1);
    if (exponent == 0) return (float)mantissa * power(1 - BIAS - MANTISSA);
    return (float)(mantissa + (1 << MANTISSA)) * power(exponent - BIAS - MANTISSA);
  }
};

struct E4M3Codes : FloatCodes<3, 7> {
  static constexpr float GREATEST = 448.0f;
};
struct E5M2Codes : FloatCodes<2, 15> {
  static constexpr float GREATEST = 57344.0f;
};

// Call `body` with the codes of an 8-bit format.
template <class Body>
INLINE void with_codes(KvFormat format, Body&& body) {
  switch (format) {
    case E4M3: return body(E4M3Codes{});
    case E5M2: return body(E5M2Codes{});
    default: return body(Int8Codes{});
  }
}

#if defined(__AVX512VBMI__)

// The bytes of each magnitude in bf16, looked up 64 at a time.
template <class Codes>
struct Bf16Table {
  alignas(64) uint8_t low[128], high[128];
  constexpr Bf16Table() : low(), high() {
    for (int code = 0; code < 128; code++) {
      const uint32_t bits = std::bit_cast<uint32_t>(Codes::magnitude(code));
      low[code] = (uint8_t)(bits >> 16), high[code] = (uint8_t)(bits >> 24);
    }
  }
};
template <class Codes>
inline constexpr Bf16Table<Codes> BF16_TABLE;

template <class Codes>
INLINE void widen(const char* from, int64_t count, bf16* to) {
  const auto& table = BF16_TABLE<Codes>;
  const __m512i low[2] = {load<__m512i>(table.low), load<__m512i>(table.low + 64)};
  const __m512i high[2] = {load<__m512i>(table.high), load<__m512i>(table.high + 64)};
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // unpacking works by 16 bytes
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  for (int64_t at = 0; at < count; at += 64) {
    const __m512i codes = _mm512_permutexvar_epi64(order, load<__m512i>(from + at));
    const __m512i index = Codes::IS_FLOAT ? codes : _mm512_abs_epi8(codes);
    const __m512i lower = _mm512_permutex2var_epi8(low[0], index, low[1]);
    const __m512i upper = _mm512_permutex2var_epi8(high[0], index, high[1]) | (codes & sign);
    store(to + at, _mm512_unpacklo_epi8(lower, upper));
    store(to + at + 32, _mm512_unpackhi_epi8(lower, upper));
  }
}

#endif

// Widen `count` codes, a multiple of 64.
template <class Codes, class T>
INLINE void widen(const char* from, int64_t count, T* to) {
  for (int64_t at = 0; at < count; at += LANES) {
    const vf values = Codes::decode(words_of<vf>((const int8_t*)from + at));
    store(to + at, round_to<T>(values));
  }
}

}  // namespace remora
