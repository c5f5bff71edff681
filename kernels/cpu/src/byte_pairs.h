// Numbers as pairs of bytes and a scale, so that their products with signed bytes are exact in 32-bit
// integers: of a partition's weights, and of heads of up to 512 numbers.
#pragma once

#include "head_vectors.h"

namespace remora {

// (128 * high + low) * scale, both signed.
struct SignedPairs {
  static constexpr float GREATEST = 127 * 128 + 63;
  static INLINE void store(vf x, int8_t* high, int8_t* low) {
    const vi whole = round_to_int(x), upper = (whole + 64) >> 7;
    remora::store(high, __builtin_convertvector(upper, vb));
    remora::store(low, __builtin_convertvector(whole - (upper << 7), vb));
  }
  static INLINE vf joined(vi high, vi low) { return to_float((high << 7) + low); }
};

// (256 * high + low) * scale, both unsigned.
struct UnsignedPairs {
  static constexpr float GREATEST = 65535;
  static INLINE void store(vf x, uint8_t* high, uint8_t* low) {
    const vi whole = round_to_int(x);
    remora::store(high, __builtin_convertvector(whole >> 8, vb));
    remora::store(low, __builtin_convertvector(whole, vb));
  }
  static INLINE vf joined(vi high, vi low) { return to_float((high << 8) + low); }
};

// Store a head times `factor` as signed pairs: high bytes, and low ones `padded` further. Returns the scale,
// which is no number if one of the head's is not finite.
inline float store_pairs(const float* head, int size, float factor, int8_t* to, int padded) {
  vf most = splat(1e-33f), zero = {};
  for_vectors(size, [&](int d, int count) {
    const vf x = load_some(head + d, count) * factor;
    most = max(most, absolute(x)), zero += x * 0.0f;
  });
  const float greatest = max_lane(most), inverse = SignedPairs::GREATEST / greatest;
  for_vectors(size, [&](int d, int count) {
    SignedPairs::store(load_some(head + d, count) * factor * inverse, to + d, to + padded + d);
  });
  return greatest / SignedPairs::GREATEST + sum(zero);
}

}  // namespace remora
