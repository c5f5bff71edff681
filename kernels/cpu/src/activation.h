// Elementwise activations of feed-forward layers, and soft caps.
//
// NaN stays NaN, so that non-finite values reach the logits.
#pragma once

#include "simd.h"

namespace remora {

enum Activation : int {
  LINEAR = 0,
  SILU = 1,
  GELU = 2,
  GELU_TANH = 3,
  RELU = 4,
  RELU2 = 5,
  CAP = 6,  // limit * tanh(x / limit)
  SIGMOID = 7,
  GATES = 8,  // gated products only; takes several parameters, see linear.cpp
};

INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }
INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

// Absolute error about 1e-7, large relative to small results; callers multiply by x.
INLINE vf tanh(vf x) {
  x = max(splat(-10.0f), min(splat(10.0f), x));  // beyond 10, tanh rounds to 1 in float
  return 1.0f - 2.0f / (1.0f + exp(2.0f * x));
}

INLINE vf cap(vf x, float limit) { return limit * tanh(x * (1.0f / limit)); }

// The error function to 1.5e-7: Abramowitz and Stegun 7.1.26, after Hastings (1955).
INLINE vf erf(vf x) {
  const vf size = min(splat(10.0f), absolute(x)), t = 1.0f / fma(size, splat(0.3275911f), splat(1.0f));
  vf y = splat(1.061405429f);
  y = fma(y, t, splat(-1.453152027f));
  y = fma(y, t, splat(1.421413741f));
  y = fma(y, t, splat(-0.284496736f));
  y = fma(y, t, splat(0.254829592f));
  const vf positive = 1.0f - y * t * exp(-size * size);
  return x < 0.0f ? -positive : positive;
}

INLINE vf gelu(vf x) { return 0.5f * x * (1.0f + erf(x * 0.70710678f)); }

// tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415).
INLINE vf gelu_tanh(vf x) {
  const vf inner = 0.79788456f * fma(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanh(inner));
}

INLINE vf relu(vf x) { return x < 0.0f ? vf{} : x; }

INLINE vf activated(Activation activation, float limit, vf x) {
  switch (activation) {
    case LINEAR: return x;
    case SILU: return silu(x);
    case GELU: return gelu(x);
    case GELU_TANH: return gelu_tanh(x);
    case RELU: return relu(x);
    case RELU2: return relu(x) * relu(x);
    case CAP: return cap(x, limit);
    case SIGMOID: return sigmoid(x);
    case GATES: return x;
  }
  return x;
}

}  // namespace remora
