// 8-bit floats (e4m3) with a scale for each column and block of 128 k (widened.h).
//
// Codes are widened to bf16, which is exact. The two codes of NaN are read as 480 and -480: a block of
// a column that contains one has a scale that is NaN.
#pragma once

#include "simd.h"

namespace remora {

typedef int16_t rh __attribute__((vector_size(REGISTER)));
typedef int8_t rbh __attribute__((vector_size(REGISTER / 2)));

// A code s eeee mmm is the number s 0000 eeee mmm 0000 of bf16 plus 120 in the exponent. Of subnormal
// numbers, eeee = 0, the added bits depend on m.
constexpr int16_t FLOAT8_ADDED = 120 << 7;
typedef int16_t AddedToSubnormals __attribute__((vector_size(16)));
constexpr AddedToSubnormals ADDED_TO_SUBNORMALS = {0,      0x3af0, 0x3b60, 0x3b90,
                                                   0x3bc0, 0x3bd0, 0x3be0, 0x3bf0};

#if !defined(__AVX512BW__)
// Numbers of the table at m of 0 to 7.
INLINE rh added_to_subnormals(rh m) {
#if defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256((__m128i)ADDED_TO_SUBNORMALS);
  return (rh)_mm256_shuffle_epi8(table, (__m256i)(m * 0x0202 + 0x0100));
#elif defined(__aarch64__)
  return (rh)vqtbl1q_u8((uint8x16_t)ADDED_TO_SUBNORMALS, (uint8x16_t)(m * 0x0202 + 0x0100));
#else
  // Between powers of two, bits of numbers rise by 32, 64 and 128.
  rh bits = 32 * m;
  bits = bits < 64 * m - 128 ? bits : 64 * m - 128;
  bits = bits < 128 * m - 256 ? bits : 128 * m - 256;
  return (bits + 0x3b80 - 16 * m) & (m != 0);
#endif
}
#endif

struct Float8Codes {
  static constexpr int BLOCK = 128, HEADER = 0, PAIR = 2;

  explicit Float8Codes(const char*) {}

  static INLINE ri widen(const char* from) {
#if defined(__AVX512BW__)
    const __m512i codes = _mm512_cvtepi8_epi16(load<__m256i>(from));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    // Of a subnormal number, the lowest five bits are m.
    const __m512i table = _mm512_broadcast_i32x4((__m128i)ADDED_TO_SUBNORMALS);
    const __m512i added = _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(FLOAT8_ADDED),
                                                        is_subnormal, codes, table);
    const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(codes, 4),
                                          _mm512_set1_epi16((int16_t)0x87f0));
    return (ri)_mm512_add_epi16(bits, added);
#else
#if defined(__AVX2__)
    const rh codes = (rh)_mm256_cvtepi8_epi16(load<__m128i>(from));
#else
    const rh codes = __builtin_convertvector(load<rbh>(from), rh);
#endif
    const rh is_subnormal = (codes & 0x78) == 0;
    const rh added = is_subnormal ? added_to_subnormals(codes & 7) : rh{} + FLOAT8_ADDED;
    return (ri)(((codes << 4) & (int16_t)0x87f0) + added);
#endif
  }
};

}  // namespace remora
