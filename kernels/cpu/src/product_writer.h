// The last part of every product: bias, updates, activation, and the store.
#pragma once

#include "linear.h"

namespace remora {

// Stores a tile's columns in the output. `column` counts within the padded weight.
struct Writer {
  const Weight& weight;
  const Output& out;
  const Updates* updates;

  // Sums stay in registers unless updates or rarer activations need them; functions that are called
  // get a copy. Tiles that are narrower than TILE_VECTORS have no updates.
  template <int MR, int NV>
  INLINE void write_tile(int row, int column, vf (&acc)[MR][NV]) const {
    if (updates || is_rare()) {
      float sums[MR][NV][LANES];
      UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < NV; v++) store(sums[r][v], acc[r][v]);
      if constexpr (NV == TILE_VECTORS)
        if (updates) updates->expand(row, MR, column, sums[0][0]);
      if (is_rare()) return write_rare(row, MR, column, NV * LANES, sums[0][0]);
      UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < NV; v++) acc[r][v] = load<vf>(sums[r][v]);
    }
    UNROLL for (int r = 0; r < MR; r++) write<NV>(row + r, column, acc[r]);
  }

  bool is_rare() const { return out.activation != (out.epilogue == GATED ? SILU : LINEAR); }

  template <int NV>
  INLINE void write(int row, int column, const vf (&acc)[NV]) const {
    vf value[NV];
    UNROLL for (int v = 0; v < NV; v++) {
      value[v] = acc[v];
      if (weight.bias) value[v] += load<vf>(weight.bias + column + v * LANES);
    }
    if constexpr (NV > 1) {
      if (out.epilogue == GATED) {
        UNROLL for (int v = 0; v < NV; v += 2)
          put(row, column / 2 + v / 2 * LANES, silu(value[v]) * value[v + 1]);
        return;
      }
    }
    float* to = (float*)out.values + (int64_t)row * out.stride + column;
    UNROLL for (int v = 0; v < NV; v++) {
      if (out.epilogue == ADD) value[v] += load<vf>(to + v * LANES);
      store(to + v * LANES, value[v]);
    }
  }

  // Stores or gates sums [num_rows][width] with any activation.
  __attribute__((noinline)) void write_rare(int row, int num_rows, int column, int width,
                                            const float* sums) const {
    const bool is_gated = out.epilogue == GATED;
    for (int r = 0; r < num_rows; r++, row++, sums += width)
      for (int at = 0; at < width; at += is_gated ? 2 * LANES : LANES) {
        const auto value = [&](int i) {
          const vf bias = weight.bias ? load<vf>(weight.bias + column + i) : vf{};
          return load<vf>(sums + i) + bias;
        };
        if (out.activation == GATES) {
          put(row, (column + at) / 2, let_through(value(at), value(at + LANES)));
          continue;
        }
        const vf made = activated(out.activation, out.limit, value(at));
        if (is_gated)
          put(row, (column + at) / 2, made * value(at + LANES));
        else
          put(row, column + at, made);
      }
  }

  // Clamped gates, as in GPT-OSS. NaN stays NaN.
  vf let_through(vf gate, vf up) const {
    gate = gate > out.limit ? splat(out.limit) : gate;
    up = up > out.limit ? splat(out.limit) : up < -out.limit ? splat(-out.limit) : up;
    return gate * sigmoid(out.sharpness * gate) * (up + out.offset);
  }

  INLINE void put(int row, int column, vf value) const {
    const int64_t at = (int64_t)row * out.stride + column;
    if (out.is_bf16)
      store((bf16*)out.values + at, narrow(value));
    else
      store((float*)out.values + at, value);
  }
};

}  // namespace remora
