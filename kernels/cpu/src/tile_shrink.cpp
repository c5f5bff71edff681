#include "tile_low_rank.h"

#if REMORA_TILES

#include <algorithm>
#include <type_traits>

#include "bf16_rows.h"
#include "buffer.h"
#include "division.h"

namespace remora {

namespace {

// 16 vectors of 16 words, rows and columns exchanged. Each round interleaves the two halves.
INLINE void transpose(vi (&rows)[TILE_SIDE]) {
  for (int round = 0; round < 4; round++) {
    vi next[TILE_SIDE];
    UNROLL for (int i = 0; i < TILE_SIDE / 2; i++) {
      const vi a = rows[i], b = rows[i + TILE_SIDE / 2];
      next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] =
          __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    UNROLL for (int i = 0; i < TILE_SIDE; i++) rows[i] = next[i];
  }
}

// So few rows are arranged for tiles instead of A.
constexpr int FEW_ROWS = 4;

// Few rows of x as right operands [k / 32][16 pairs][16 rows]. Columns past the last row are undefined;
// they change no others.
class RowColumns {
 public:
  template <class X>
  const int32_t* arrange(const X* x, int64_t stride, const AdapterRows::Block& block, int size,
                         uint64_t stage) {
    int32_t* to = data_.reserve((size_t)ceil_div(size, DEPTH) * TILE_SIDE * TILE_SIDE);
    if (stage == stage_ && block.rows == rows_) return to;
    stage_ = stage, rows_ = block.rows;
    for (int row = 0; row < block.count; row++) {
      const X* from = x + block.rows[row] * stride;
      for (int at = 0; at < size; at += DEPTH) {
        int32_t pairs[TILE_SIDE];
        store(pairs, values_of(from + at, std::min(DEPTH, size - at)));
        int32_t* tile = to + at / DEPTH * TILE_SIDE * TILE_SIDE + row;
        UNROLL for (int pair = 0; pair < TILE_SIDE; pair++) tile[pair * TILE_SIDE] = pairs[pair];
      }
    }
    return to;
  }

 private:
  uint64_t stage_ = 0;
  const int32_t* rows_ = nullptr;
  Buffer<int32_t> data_;
};

// Up to 16 ranks of an adapter's A, for one part.
struct Ranks {
  const bf16* a;
  int size, num_ranks;

  // As a left operand.
  INLINE void load(int at) const {
    if (at + DEPTH <= size) return load_tile<LEFT>(a + at, size * sizeof(bf16));
    alignas(64) bf16 padded[TILE_SIDE][DEPTH];
    for (int j = 0; j < num_ranks; j++) store(padded[j], values_of(a + (int64_t)j * size + at, size - at));
    load_tile<LEFT>(padded, TILE_ROW_BYTES);
  }

  // As right operands [k / 32][16 pairs][16 ranks].
  void arrange(bf16* to) const {
    for (int at = 0; at < size; at += DEPTH) {
      const int count = std::min(DEPTH, size - at);
      vi pairs[TILE_SIDE];
      for (int j = 0; j < TILE_SIDE; j++)
        pairs[j] = j < num_ranks ? values_of(a + (int64_t)j * size + at, count) : vi{};
      transpose(pairs);
      UNROLL for (int pair = 0; pair < TILE_SIDE; pair++, to += DEPTH) store(to, pairs[pair]);
    }
  }
};

float rounded(float x) { return widen(narrow(x)); }

// Few rows: x is the right operand, and sums are [rank][row].
void shrink_few(const Ranks& ranks, const int32_t* columns, const AdapterRows::Block& block,
                float* const* to) {
  const char* next = (const char*)(ranks.a + TILE_SIDE * ranks.size);  // probably read after this
  TileUse use(TilePalette(TILE_ROW_BYTES, ranks.num_ranks));
  zero_tile<SUMS>();
  for (int at = 0; at < ranks.size; at += DEPTH, columns += TILE_SIDE * TILE_SIDE) {
    for (int line = 0; line < ranks.num_ranks; line++, next += 64) __builtin_prefetch(next, 0, 2);
    ranks.load(at);
    load_tile<RIGHT>(columns, TILE_ROW_BYTES);
    dot_tiles_bf16<SUMS, LEFT, RIGHT>();
  }
  alignas(64) float sums[TILE_SIDE][TILE_SIDE];
  store_tile<SUMS>(sums, TILE_ROW_BYTES);
  for (int row = 0; row < block.count; row++)
    for (int j = 0; j < ranks.num_ranks; j++) to[row][j] = rounded(sums[j][row]);
}

// 16 rows of x and 32 values along k, as a left operand. They are copied unless a tile can read them
// where they are.
template <class X>
INLINE void load_rows(const X* x, int64_t stride, const int32_t* rows, int num_rows, bool are_adjacent,
                      int at, int count, bf16* copy) {
  if constexpr (std::is_same_v<X, bf16>)
    if (are_adjacent && count == DEPTH)
      return load_tile<LEFT>(x + rows[0] * stride + at, stride * sizeof(bf16));
  for (int row = 0; row < num_rows; row++)
    store(copy + row * DEPTH, values_of(x + rows[row] * stride + at, count));
  load_tile<LEFT>(copy, TILE_ROW_BYTES);
}

// Many rows: A is the right operand, and sums are [row][rank].
template <class X>
void shrink_many(const Ranks& ranks, const bf16* columns, const X* x, int64_t stride,
                 const AdapterRows::Block& block, float* const* to) {
  constexpr int BLOCKS = AdapterRows::BLOCK / TILE_SIDE;
  static_assert(BLOCKS == 4);
  const int palette_rows = std::min(block.count, TILE_SIDE);
  const auto rows_of = [&](int b) { return std::min(TILE_SIDE, block.count - b * TILE_SIDE); };
  bool are_adjacent[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) {
    const int32_t* rows = block.rows + b * TILE_SIDE;
    are_adjacent[b] = rows_of(b) == palette_rows && rows[palette_rows - 1] == rows[0] + palette_rows - 1;
  }
  TileUse use(TilePalette(TILE_ROW_BYTES, palette_rows));
  zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
  alignas(64) bf16 copies[BLOCKS][TILE_SIDE * DEPTH];
  for (int at = 0; at < ranks.size; at += DEPTH, columns += TILE_SIDE * DEPTH) {
    const int count = std::min(DEPTH, ranks.size - at);
    load_tile<RIGHT>(columns, TILE_ROW_BYTES);
    const auto add_block = [&](auto which) {
      constexpr int B = decltype(which)::value;
      if (block.count <= B * TILE_SIDE) return;
      load_rows(x, stride, block.rows + B * TILE_SIDE, rows_of(B), are_adjacent[B], at, count,
                copies[B]);
      dot_tiles_bf16<SUMS + B, LEFT, RIGHT>();
    };
    add_block(std::integral_constant<int, 0>()), add_block(std::integral_constant<int, 1>());
    add_block(std::integral_constant<int, 2>()), add_block(std::integral_constant<int, 3>());
  }
  alignas(64) float sums[BLOCKS][TILE_SIDE][TILE_SIDE];
  store_tile<SUMS>(sums[0], TILE_ROW_BYTES), store_tile<SUMS + 1>(sums[1], TILE_ROW_BYTES);
  store_tile<SUMS + 2>(sums[2], TILE_ROW_BYTES), store_tile<SUMS + 3>(sums[3], TILE_ROW_BYTES);
  for (int row = 0; row < block.count; row++)
    for (int j = 0; j < ranks.num_ranks; j++)
      to[row][j] = rounded(sums[row / TILE_SIDE][row % TILE_SIDE][j]);
}

struct Scratch {
  RowColumns columns;
  Buffer<bf16> ranks;
};
thread_local Scratch scratch;

template <class X>
void shrink_rows(const LowRank& low, const AdapterRows::Block& block, int part, int first, int last,
                 const X* x, int64_t stride, uint64_t stage) {
  const int64_t row = ((int64_t)block.slot * low.num_parts + part) * low.max_rank + first;
  const Ranks ranks{(const bf16*)low.a + row * low.inputs, low.inputs, last - first};
  float* to[AdapterRows::BLOCK];
  for (int r = 0; r < block.count; r++) to[r] = low.shrunk_of(block.rows[r], part) + first;
  if (block.count <= FEW_ROWS)
    return shrink_few(ranks, scratch.columns.arrange(x, stride, block, low.inputs, stage), block, to);
  bf16* columns = scratch.ranks.reserve((size_t)ceil_div(low.inputs, DEPTH) * DEPTH * TILE_SIDE);
  ranks.arrange(columns);
  shrink_many(ranks, columns, x, stride, block, to);
}

}  // namespace

void shrink_by_tiles(const LowRank& low, const AdapterRows::Block& block, int part, int first,
                     int last, const void* x, bool x_is_bf16, int64_t x_stride, uint64_t stage) {
  if (x_is_bf16)
    shrink_rows(low, block, part, first, last, (const bf16*)x, x_stride, stage);
  else
    shrink_rows(low, block, part, first, last, (const float*)x, x_stride, stage);
}

}  // namespace remora

#endif
