// 8-bit floats (e4m3) with scales for blocks of 128 k, multiplied with rows of bf16.
//
// A block of a panel consists of scales [64] float and codes; the last one may be short. A product is
//
//   sum over blocks of  (sum over k of code * x) * scale
//
// Codes are widened to bf16, which is exact, and every sum is a float. The two codes of NaN are read
// as 480 and -480: a block of a column that contains one has a scale that is NaN.
#pragma once

#include "grouped.h"

namespace remora {

constexpr int FLOAT8_BLOCK = 128;  // k
constexpr int FLOAT8_SCALES = PANEL * sizeof(float);
constexpr int FLOAT8_VECTOR = 2 * LANES;  // bytes of two k of a vector of columns

inline int64_t float8_panel_bytes(int padded_k) {
  const int blocks = (padded_k + FLOAT8_BLOCK - 1) / FLOAT8_BLOCK;
  return (int64_t)padded_k * PANEL + (int64_t)blocks * FLOAT8_SCALES;
}

// The block of a panel that begins at `k`.
INLINE const char* float8_block(const char* panel, int k) {
  return panel + (int64_t)(k / FLOAT8_BLOCK) * (FLOAT8_SCALES + FLOAT8_BLOCK * PANEL);
}

typedef int16_t rh __attribute__((vector_size(REGISTER)));
typedef int8_t rbh __attribute__((vector_size(REGISTER / 2)));

#if !defined(__AVX512BW__)
// The bits of m * 2^-9 as bf16, for m of 0 to 7.
INLINE rh subnormals(rh m) {
#if defined(__AVX2__) || defined(__aarch64__)
  typedef int16_t Table __attribute__((vector_size(16)));
  const Table table = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const rh bytes = m * 0x0202 + 0x0100;  // of each number, in the table
#if defined(__AVX2__)
  const __m256i tables = _mm256_broadcastsi128_si256((__m128i)table);
  return (rh)_mm256_shuffle_epi8(tables, (__m256i)bytes);
#else
  return (rh)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)bytes);
#endif
#else
  // Between powers of two, bits rise by 32, 64 and 128.
  rh bits = 32 * m;
  bits = bits < 64 * m - 128 ? bits : 64 * m - 128;
  bits = bits < 128 * m - 256 ? bits : 128 * m - 256;
  return (bits + 0x3b80) & (m != 0);
#endif
}
#endif

// Codes of REGISTER_LANES columns, two of each, as bf16. Exponents of bf16 are greater by 120.
INLINE ri widen_e4m3(const char* from) {
#if defined(__AVX512BW__)
  const __m512i codes = _mm512_cvtepi8_epi16(load<__m256i>(from));
  const __m512i size = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  // Of a subnormal number, the lowest five bits are m.
  const __m512i table = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __mmask32 is_subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
  const __m512i value = _mm512_mask_permutexvar_epi16(normal, is_subnormal, codes, table);
  const __m512i sign = _mm512_set1_epi16((int16_t)0x8000);
  return (ri)_mm512_ternarylogic_epi32(value, codes, sign, 0xf8);  // value | (codes & sign)
#else
#if defined(__AVX2__)
  const rh codes = (rh)_mm256_cvtepi8_epi16(load<__m128i>(from));
#else
  const rh codes = __builtin_convertvector(load<rbh>(from), rh);
#endif
  const rh normal = ((codes & 0x7f) << 4) + (120 << 7);
  const rh value = (codes & 0x78) == 0 ? subnormals(codes & 7) : normal;
  return (ri)(value | (codes & (int16_t)0x8000));
#endif
}

// Two k of a column (dot.h).
struct StepF8 {
  typedef bf16 element;
  static constexpr int K = 2, BYTES = FLOAT8_VECTOR;
  static INLINE ri columns(const char* from) { return widen_e4m3(from); }
  static INLINE rf add(rf acc, ri x, ri w) { return dot_bf16(acc, x, w); }
};

}  // namespace remora
