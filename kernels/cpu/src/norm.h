// Norms of a row: by the root mean square or, around its mean, by the standard deviation.
#pragma once

namespace remora {

struct NormWeights {
  const float* weight;  // [size]; null where there is no norm
  const float* bias;    // [size] or null
  int size;             // elements of a row
  int span;             // that are normalised together; divides the size
  bool is_centered;     // their mean is subtracted first
  float epsilon;
};

// out = x, normalised. The two may be the same row.
void normalize(const NormWeights& norm, const float* x, float* out);

}  // namespace remora
