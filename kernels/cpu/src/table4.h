// 4-bit places in a table of 16 numbers, with a scale for each column and block of 64 k (widened.h).
//
// A panel begins with the table: 16 numbers of bf16, twice. A byte holds two k of a column, the first
// one in the low bits.
#pragma once

#include "simd.h"

namespace remora {

struct Table4Codes {
  static constexpr int BLOCK = 64, HEADER = 64, PAIR = 1;

#if defined(__AVX512BW__)
  explicit Table4Codes(const char* panel) : table_(load<__m512i>(panel)) {}

  // Of a word, the lowest five bits are the place: the table's halves are equal.
  INLINE ri widen(const char* from) const {
    const __m512i both = _mm512_cvtepu8_epi32(load<__m128i>(from));
    const __m512i places = _mm512_or_si512(both, _mm512_slli_epi32(both, 12));
    return (ri)_mm512_permutexvar_epi16(places, table_);
  }

 private:
  __m512i table_;
#elif defined(__AVX2__)
  explicit Table4Codes(const char* panel) {
    const __m128i first = load<__m128i>(panel), last = load<__m128i>(panel + 16);
    const __m128i low = _mm_set1_epi16(255);
    low_ = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(first, low), _mm_and_si128(last, low)));
    high_ = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8)));
  }

  // Low and high bytes of the numbers are looked up apart; a place from 128 on gives 0.
  INLINE ri widen(const char* from) const {
    const ri both = (ri)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    const ri places = (both | both << 12) & 0x000f000f;
    const ri low = (ri)_mm256_shuffle_epi8(low_, (__m256i)(places | (int32_t)0x80008000));
    return low | (ri)_mm256_shuffle_epi8(high_, (__m256i)(places << 8 | 0x00800080));
  }

 private:
  __m256i low_, high_;
#else
  explicit Table4Codes(const char* panel) { memcpy(table_, panel, sizeof(table_)); }

  INLINE ri widen(const char* from) const {
    const uint8_t* both = (const uint8_t*)from;
#if defined(__aarch64__)
    const ri pairs = {both[0], both[1], both[2], both[3]};
    const ri places = (pairs | pairs << 12) & 0x000f000f;
    const uint8x16x2_t table = {load<uint8x16_t>(table_), load<uint8x16_t>(table_ + 8)};
    return (ri)vqtbl2q_u8(table, (uint8x16_t)(places * 0x0202 + 0x01000100));
#else
    ri numbers;
    for (int i = 0; i < REGISTER_LANES; i++)
      numbers[i] = (int32_t)(table_[both[i] & 15] | (uint32_t)table_[both[i] >> 4] << 16);
    return numbers;
#endif
  }

 private:
  bf16 table_[16];
#endif
};

}  // namespace remora
