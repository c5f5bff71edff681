// What positions do to the scores of 16 keys: they fall with distance, and hidden ones do not count.
#pragma once

#include "format.h"

namespace remora {

constexpr float LOG2_E = 1.44269504f;
inline constexpr int32_t IOTA[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Scores fall with the distance of keys; `ahead` is that of lane 0. ALiBi, arXiv:2108.12409.
INLINE vf fallen(vf s, float ahead, float slope) {
  return fma(to_float(load<vi>(IOTA)) + ahead, splat(slope * LOG2_E), s);
}

// Positions of lane 0 and of the first visible key, relative to the query; positions above 0 are in
// the future.
INLINE vf masked(vf s, int ahead, int seen) {
  const vi at = load<vi>(IOTA) + ahead;
  const vi hidden = (at > 0) | (at < seen);
  return bits_to_float((float_to_bits(s) & ~hidden) | (float_to_bits(splat(-3e38f)) & hidden));
}

}  // namespace remora
