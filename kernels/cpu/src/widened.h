// Widened formats: codes with float scales for blocks of k, multiplied with rows of bf16.
//
// A panel consists of a header and blocks of k. A block consists of scales [64] float and codes; the
// last one may be short. A product is
//
//   sum over blocks of  (sum over k of number of the code * x) * scale
//
// Numbers are bf16, and every sum is a float. A format is described by its Codes:
//
//   BLOCK         k that share a scale
//   HEADER        bytes of the header
//   PAIR          bytes of two k of a column
//   Codes(panel)  reads the header
//   widen(from)   returns two k of REGISTER_LANES columns as bf16
#pragma once

#include <type_traits>

#include "float8.h"
#include "format.h"
#include "grouped.h"
#include "table4.h"

namespace remora {

constexpr int BLOCK_SCALES = PANEL * sizeof(float);  // bytes

// Call `body` with a widened format's codes: body(std::type_identity<Codes>).
template <class Body>
INLINE auto with_widened(Format format, Body&& body) {
  if (format == T4) return body(std::type_identity<Table4Codes>{});
  return body(std::type_identity<Float8Codes>{});
}

template <class Codes>
constexpr int64_t widened_panel_bytes(int padded_k) {
  const int blocks = (padded_k + Codes::BLOCK - 1) / Codes::BLOCK;
  return Codes::HEADER + (int64_t)padded_k / 2 * Codes::PAIR * PANEL + (int64_t)blocks * BLOCK_SCALES;
}

// The block of a panel that begins at `k`.
template <class Codes>
INLINE const char* widened_block(const char* panel, int k) {
  constexpr int BYTES = BLOCK_SCALES + Codes::BLOCK / 2 * Codes::PAIR * PANEL;
  return panel + Codes::HEADER + (int64_t)(k / Codes::BLOCK) * BYTES;
}

// Two k of a column (dot.h).
template <class Codes>
struct StepWidened {
  typedef bf16 element;
  static constexpr int K = 2, BYTES = Codes::PAIR * LANES;
  Codes codes;
  INLINE ri columns(const char* from) const { return codes.widen(from); }
  static INLINE rf add(rf acc, ri x, ri w) { return dot_bf16(acc, x, w); }
};

}  // namespace remora
