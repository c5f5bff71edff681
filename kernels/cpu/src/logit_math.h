// Operations that only sampling uses. Knows nothing of rows.
#pragma once

#include "simd.h"

namespace remora {

// e^x for x <= 0 to about one unit in the last place; exactly 0 below -87. The reduction is in two
// parts because weights of the nucleus are compared with sums of the vocabulary.
INLINE vf exp_negative(vf x) {
  const vi underflows = x < -87.0f;
  x = max(x, splat(-87.0f));
  const vi whole = round_to_int(x * 1.44269504f);
  const vf w = to_float(whole);
  vf r = fma(w, splat(-0.693115234375f), x);  // the product is exact
  r = fma(w, splat(-3.19461849e-5f), r);
  vf y = splat(1.38145401e-3f);  // minimax polynomial of (e^r - 1 - r) / r^2
  y = fma(y, r, splat(8.36874521e-3f));
  y = fma(y, r, splat(4.16683908e-2f));
  y = fma(y, r, splat(1.66665204e-1f));
  y = fma(y, r, splat(4.99999934e-1f));
  y = fma(y * r, r, r) + 1.0f;
  return bits_to_float((float_to_bits(y) + (whole << 23)) & ~underflows);
}

INLINE vu mix32(vu x) {
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

// Fractions of (0, 1) for ids from `first` on; see `exponentials` in kernels/sampling.py.
INLINE vf random_fractions(uint64_t key, int first) {
  const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vu bits = mix32(mix32((lane + (uint32_t)first) * 0x9E3779B1u + (uint32_t)key) ^ (uint32_t)(key >> 32));
  const vf fractions = (to_float((vi)(bits >> 1)) + 0.5f) * 0x1p-31f;
  return min(fractions, splat(1 - 0x1p-24f));
}

// Store the kept lanes contiguously; return their number. Writes up to 16 floats.
INLINE int append(float* to, vf x, vi keep) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_test_epi32_mask((__m512i)keep, (__m512i)keep);
  store(to, (vf)_mm512_maskz_compress_ps(mask, (__m512)x));
  return __builtin_popcount(mask);
#else
  int count = 0;
  for (int lane = 0; lane < LANES; lane++) {
    to[count] = x[lane];
    count -= keep[lane];
  }
  return count;
#endif
}

INLINE bool any(vi lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#else
  int32_t all = 0;
  for (int lane = 0; lane < LANES; lane++) all |= lanes[lane];
  return all != 0;
#endif
}

}  // namespace remora
