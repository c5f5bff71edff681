// Rows of tiles in bf16, from numbers in bf16 or float.
#pragma once

#include <algorithm>

#include "tile.h"

namespace remora {

constexpr int DEPTH = TILE_ROW_BYTES / sizeof(bf16);  // values of a row

INLINE vi joined(vuh low, vuh high) {
  return (vi)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// 32 values in bf16.
INLINE vi values_of(const bf16* from) { return load<vi>(from); }
INLINE vi values_of(const float* from) {
  return joined(narrow(load<vf>(from)), narrow(load<vf>(from + LANES)));
}

// The first `count` of 32 values, then zeros.
template <class T>
INLINE vi values_of(const T* from, int count) {
  if (count == DEPTH) return values_of(from);
  T padded[DEPTH] = {};
  std::copy_n(from, count, padded);
  return values_of(padded);
}

}  // namespace remora
