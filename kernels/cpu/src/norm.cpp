#include "norm.h"

#include <cmath>

#include "simd.h"

namespace remora {

namespace {

// The last values of a row, fewer than a vector, then zeros.
vf last_values(const float* x, int count) {
  float values[LANES] = {};
  for (int i = 0; i < count; i++) values[i] = x[i];
  return load<vf>(values);
}

// Sums have the same order for every instruction set: 16 partial sums, then their sum.
float mean(const float* x, int size) {
  vf total = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) total += load<vf>(x + i);
  total += last_values(x + i, size - i);
  return sum(total) / (float)size;
}

float sum_of_squares(const float* x, int size, float center) {
  vf total = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    const vf part = load<vf>(x + i) - center;
    total = fma(part, part, total);
  }
  float rest[LANES];
  for (int lane = 0; lane < size - i; lane++) rest[lane] = x[i + lane] - center;
  const vf part = last_values(rest, size - i);
  return sum(fma(part, part, total));
}

void normalize_span(const NormWeights& norm, int first, const float* x, float* out) {
  const float* weight = norm.weight + first;
  const float center = norm.is_centered ? mean(x, norm.span) : 0.0f;
  const float square = sum_of_squares(x, norm.span, center) / (float)norm.span;
  const float factor = 1.0f / sqrtf(square + norm.epsilon);
  int i = 0;
  for (; i + LANES <= norm.span; i += LANES)
    store(out + i, (load<vf>(x + i) - center) * factor * load<vf>(weight + i));
  for (; i < norm.span; i++) out[i] = (x[i] - center) * factor * weight[i];
  if (!norm.bias) return;
  for (i = 0; i < norm.span; i++) out[i] += norm.bias[first + i];
}

}  // namespace

void normalize(const NormWeights& norm, const float* x, float* out) {
  for (int first = 0; first < norm.size; first += norm.span)
    normalize_span(norm, first, x + first, out + first);
}

}  // namespace remora
