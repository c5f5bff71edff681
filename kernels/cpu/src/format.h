// Number formats of weights, adapters, and cached K and V.
#pragma once

#include <type_traits>

#include "simd.h"

namespace remora {

// From Q8 on, formats are grouped (grouped.h). From I4_128 on, they hold integers of a checkpoint: bits, Z
// with zeros, and the k that share a scale; from 32 to 47, blocks of GGUF of the same name. From F8 on, they
// are widened (widened.h). The others are plain arrays of numbers.
enum Format : int {
  F32 = 0,
  BF16 = 1,
  F16 = 2,
  Q8 = 3,
  Q4 = 4,
  I4_128 = 8,
  I4Z_32 = 9,
  I4Z_64 = 10,
  I4Z_128 = 11,
  I8_128 = 12,
  I8Z_64 = 13,
  I8Z_32 = 14,
  Q4_0 = 32,
  Q4_1 = 33,
  Q5_0 = 34,
  Q5_1 = 35,
  Q8_0 = 36,
  Q2_K = 37,
  Q3_K = 38,
  Q4_K = 39,
  Q5_K = 40,
  Q6_K = 41,
  IQ4_NL = 42,
  IQ4_XS = 43,
  MXFP4 = 48,
  F8 = 64,
  T4 = 65,
};

inline bool is_grouped(Format format) { return format >= Q8 && format < F8; }
inline bool is_widened(Format format) { return format >= F8; }

// Format of the rows that a weight is multiplied with.
inline Format format_of_rows(Format format) {
  return format == F16 ? F32 : is_widened(format) ? BF16 : format;
}

// Of plain formats: bytes of a number, and number `index` of an array.
inline int number_bytes(Format format) { return format == F32 ? 4 : 2; }

INLINE float number_at(Format format, const void* from, int64_t index) {
  switch (format) {
    case BF16: return widen(((const bf16*)from)[index]);
    case F16: return widen(((const f16*)from)[index]);
    default: return ((const float*)from)[index];
  }
}

// Call `body` with a number of a plain format's type.
template <class Body>
INLINE auto with_number(Format format, Body&& body) {
  switch (format) {
    case BF16: return body(bf16{});
    case F16: return body(f16{});
    default: return body(float{});
  }
}

// Round to numbers of type T.
template <class T>
INLINE auto round_to(vf x) {
  if constexpr (std::is_same_v<T, bf16>)
    return narrow(x);
  else if constexpr (std::is_same_v<T, f16>)
    return narrow_f16(x);
  else
    return x;
}

}  // namespace remora
