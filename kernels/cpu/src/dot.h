// The inner product of all matrix products: a register tile of rows times vectors of columns.
#pragma once

#include <type_traits>

#include "format.h"

namespace remora {

// One step of k: its number of values, 4 bytes wide in rows, and their accumulation. 16 columns are
// stored in BYTES.
struct StepF32 {
  typedef float element, stored;
  static constexpr int K = 1, BYTES = 64;
  static INLINE ri columns(const char* from) { return load<ri>(from); }
  static INLINE rf add(rf acc, ri x, ri w) { return fma((rf)x, (rf)w, acc); }
};

struct StepBF16 {
  typedef bf16 element, stored;
  static constexpr int K = 2, BYTES = 64;
  static INLINE ri columns(const char* from) { return load<ri>(from); }
  static INLINE rf add(rf acc, ri x, ri w) { return dot_bf16(acc, x, w); }
};

// Columns are widened, and rows are floats: nothing overflows that is finite in float32.
struct StepF16 {
  typedef float element;
  typedef f16 stored;
  static constexpr int K = 1, BYTES = 32;
  static INLINE ri columns(const char* from) { return (ri)widen_f16(load<ruh>(from)); }
  static INLINE rf add(rf acc, ri x, ri w) { return fma((rf)x, (rf)w, acc); }
};

// Calls body(step of the products with K and V of a format).
template <class Body>
INLINE void with_step(Format format, Body&& body) {
  switch (format) {
    case BF16: return body(StepBF16{});
    case F16: return body(StepF16{});
    default: return body(StepF32{});
  }
}

// Split vectors into registers, and join them again.
template <int MR, int NV>
INLINE void to_registers(const vf (&from)[MR][NV], rf (&to)[MR][NV * PARTS]) {
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int v = 0; v < NV * PARTS; v++)
      to[r][v] = load<rf>((const char*)&from[r][v / PARTS] + v % PARTS * REGISTER);
}

// NV vectors of each row, from `first` on.
template <int MR, int NV, int N>
INLINE void to_vectors(const rf (&from)[MR][NV * PARTS], vf (&to)[MR][N], int first = 0) {
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int v = 0; v < NV * PARTS; v++)
      store((char*)&to[r][first + v / PARTS] + v % PARTS * REGISTER, from[r][v]);
}

// sums[r][v] += the product of row r with the 16 columns at columns[v], over `steps` steps of k,
// `column_step` bytes apart. Ascending k, one accumulator per sum.
template <class Step, int MR, int NV>
INLINE void dot_columns(vf (&sums)[MR][NV], const typename Step::element* rows, int64_t stride,
                        const char* const* columns, int64_t column_step, int steps,
                        Step of = Step{}) {
  constexpr int N = NV * PARTS;
  const char* at[NV];
  UNROLL for (int v = 0; v < NV; v++) at[v] = columns[v];
  rf acc[MR][N];
  to_registers(sums, acc);
  for (int step = 0; step < steps; step++) {
    ri column[N];
    UNROLL for (int v = 0; v < N; v++)
      column[v] = of.columns(at[v / PARTS] + step * column_step + v % PARTS * (Step::BYTES / PARTS));
    UNROLL for (int r = 0; r < MR; r++) {
      const ri value = spread_word(rows + r * stride + step * Step::K);
      UNROLL for (int v = 0; v < N; v++) acc[r][v] = Step::add(acc[r][v], value, column[v]);
    }
  }
  to_vectors<MR, NV>(acc, sums);
}

// Call `body` with the number of rows, 1 to MAX, as a constant.
template <int MAX, class Body>
INLINE void with_rows(int rows, Body&& body) {
  static_assert(MAX <= 6);
  switch (rows) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, MAX < 2 ? MAX : 2>{});
    case 3: return body(std::integral_constant<int, MAX < 3 ? MAX : 3>{});
    case 4: return body(std::integral_constant<int, MAX < 4 ? MAX : 4>{});
    case 5: return body(std::integral_constant<int, MAX < 5 ? MAX : 5>{});
    default: return body(std::integral_constant<int, MAX>{});
  }
}

}  // namespace remora
