// RMS norm and layer norm of a row.
#pragma once

namespace remora {

struct NormWeights {
  const float* weight;  // [size]; null = no norm
  const float* bias;    // [size] or null
  int size;             // elements of a row
  int span;             // elements that are normalised together; divides size
  bool is_centered;     // the mean is subtracted first
  float epsilon;
};

// out = x, normalised. Both may be the same row.
void normalize(const NormWeights& norm, const float* x, float* out);

}  // namespace remora
