// Float operations that only sampling uses. Knows nothing of rows.
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
  int32_t all = 0;
  for (int lane = 0; lane < LANES; lane++) all |= lanes[lane];
  return all != 0;
}

}  // namespace remora
