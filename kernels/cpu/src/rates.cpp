// Rates of the products that this library uses, for `remora doctor`: one thread, operands in registers.
#include <algorithm>
#include <chrono>

#include "dot.h"
#include "tile.h"

namespace remora {

namespace {

typedef std::chrono::steady_clock Clock;

// Billions of operations per second of body(), the best of a few tries of about a millisecond.
template <class Body>
double best_rate(double operations, Body&& body) {
  double best = 0;
  for (int round = 0; round < 12; round++) {
    const auto begin = Clock::now();
    body();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::max(best, operations / seconds / 1e9);
  }
  return best;
}

// Independent accumulators, as many as a tile has, hide the latency of an instruction.
template <class Register, class Operand, class Add>
double rate_of(double operations_per_lane, Add&& add) {
  constexpr int ACCUMULATORS = TILE_ROWS * TILE_VECTORS * PARTS, STEPS = 10000;
  static volatile int32_t seed = 0;  // unknown to the compiler
  const Operand a = Operand{} + (decltype(Operand{}[0]))seed, b = a;
  Register acc[ACCUMULATORS] = {};
  const double rate = best_rate(operations_per_lane * REGISTER_LANES * ACCUMULATORS * STEPS, [&] {
    for (int step = 0; step < STEPS; step++)
      UNROLL for (int i = 0; i < ACCUMULATORS; i++) acc[i] = add(acc[i], a, b);
  });
  for (const auto& each : acc) seed = seed + (int32_t)each[0];
  return rate;
}

#if REMORA_TILES
template <class Dot>
double rate_of_tiles(int depth, Dot&& dot) {
  constexpr int STEPS = REMORA_TILES == 1 ? 20000 : 100;
  alignas(64) static const char zeros[TILE_BYTES] = {};
  TileUse use(TilePalette(TILE_ROW_BYTES, TILE_SIDE));
  zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
  load_tile<LEFT>(zeros, 64), load_tile<RIGHT>(zeros, 64);
  return best_rate(2.0 * TILE_SIDE * TILE_SIDE * depth * 4 * STEPS, [&] {
    for (int step = 0; step < STEPS; step++) dot();
  });
}
#endif

}  // namespace

}  // namespace remora

// How products of bfloat16 vectors are computed.
extern "C" const char* remora_bf16_product() {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(__AVX512BF16__) && !REMORA_WIDEN_BF16
  return "dot products";
#else
  return "float32 multiply-adds";
#endif
}

// GFLOP/s of float32 and bfloat16 products and GOP/s of int8 ones; then those of tile registers, or 0.
extern "C" void remora_measure_rates(double* rates) {
  using namespace remora;
  rates[0] = rate_of<rf, rf>(2, [](rf acc, rf a, rf b) { return fma(a, b, acc); });
  rates[1] = rate_of<rf, ri>(4, [](rf acc, ri a, ri b) { return dot_bf16(acc, a, b); });
  rates[2] = rate_of<ri, ri>(8, [](ri acc, ri a, ri b) { return dot_u8s8(acc, a, b); });
  rates[3] = rates[4] = 0;
#if REMORA_TILES
  rates[3] = rate_of_tiles(32, [] {
    dot_tiles_bf16<SUMS, LEFT, RIGHT>(), dot_tiles_bf16<SUMS + 1, LEFT, RIGHT>();
    dot_tiles_bf16<SUMS + 2, LEFT, RIGHT>(), dot_tiles_bf16<SUMS + 3, LEFT, RIGHT>();
  });
  rates[4] = rate_of_tiles(64, [] {
    dot_tiles_s8<SUMS, LEFT, RIGHT>(), dot_tiles_s8<SUMS + 1, LEFT, RIGHT>();
    dot_tiles_s8<SUMS + 2, LEFT, RIGHT>(), dot_tiles_s8<SUMS + 3, LEFT, RIGHT>();
  });
#endif
}
