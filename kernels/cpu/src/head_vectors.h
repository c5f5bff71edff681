// Vectors of one head of q, k or v; the last may be shorter than the others.
#pragma once

#include <algorithm>

#include "format.h"

namespace remora {

// Calls body(first element, number of elements) for vectors of a head.
template <class Body>
INLINE void for_vectors(int size, Body&& body) {
  int at = 0;
  for (; at + LANES <= size; at += LANES) body(at, LANES);
  if (at < size) body(at, size - at);
}

INLINE vf load_some(const float* from, int count) {
  if (count == LANES) return load<vf>(from);
  float values[LANES] = {};
  std::copy_n(from, count, values);
  return load<vf>(values);
}

template <class T>
INLINE void store_some(T* to, vf x, int count) {
  T values[LANES];
  store(values, round_to<T>(x));
  if (count == LANES)
    memcpy(to, values, sizeof(values));
  else
    std::copy_n(values, count, to);
}

// Replaces NaN and what would round to infinity: both survive a multiplication by 0.
template <class T>
INLINE vf finite(vf x) {
  const vf most = splat(std::is_same_v<T, f16> ? 65504.0f : 3.38e38f);
  return min(most, max(-most, x == x ? x : vf{}));
}

}  // namespace remora
