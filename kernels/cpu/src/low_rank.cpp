#include "low_rank.h"

#include <algorithm>

#include "dot.h"
#include "tile_low_rank.h"

namespace remora {

namespace {

// Rows of x and of A in one tile.
#if defined(__AVX512F__)
constexpr int DOT_ROWS = 4, DOT_RANKS = 4;
#else
constexpr int DOT_ROWS = 2, DOT_RANKS = 2;
#endif

INLINE float number(float x) { return x; }
INLINE float number(bf16 x) { return widen(x); }
INLINE float number(f16 x) { return widen(x); }
INLINE rf numbers(const float* from) { return load<rf>(from); }
INLINE rf numbers(const bf16* from) { return widen(load<ruh>(from)); }
INLINE rf numbers(const f16* from) { return widen_f16(load<ruh>(from)); }

// acc[r][j] += x[r] * a[j], lane by lane, for 16 values at offset `at` of x[r] and of row j of A.
template <class X, class A, int MR, int RANKS>
INLINE void add_products(const X* const* x, const A* a, int64_t size, int64_t at,
                         rf (&acc)[MR][RANKS][PARTS]) {
  UNROLL for (int p = 0; p < PARTS; p++) {
    rf value[MR];
    UNROLL for (int r = 0; r < MR; r++) value[r] = numbers(x[r] + at + p * REGISTER_LANES);
    UNROLL for (int j = 0; j < RANKS; j++) {
      const rf weight = numbers(a + j * size + at + p * REGISTER_LANES);
      UNROLL for (int r = 0; r < MR; r++) acc[r][j][p] = fma(value[r], weight, acc[r][j][p]);
    }
  }
}

// The remaining values from `at` on, then zeros.
template <int ROWS, class T>
struct Tail {
  T values[ROWS][LANES] = {};
  const T* rows[ROWS];

  template <class Row>
  Tail(Row&& row, int64_t at, int64_t size) {
    for (int r = 0; r < ROWS; r++) {
      rows[r] = values[r];
      std::copy(row(r) + at, row(r) + size, values[r]);
    }
  }
};

// MR rows of x times RANKS rows of A: 16 partial sums each over ascending k, then their sum.
template <class X, class A, int MR, int RANKS>
INLINE void dot_rows(const X* const* x, const A* a, int64_t size, float* const* to) {
  rf acc[MR][RANKS][PARTS] = {};
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    // Prefetch A for the next call: rows are too short for the hardware prefetcher.
    UNROLL for (int j = 0; j < RANKS; j++) __builtin_prefetch(a + (RANKS + j) * size + at);
    add_products(x, a, size, at, acc);
  }
  if (at < size) {
    const Tail<MR, X> last_x([&](int r) { return x[r]; }, at, size);
    const Tail<RANKS, A> last_a([&](int j) { return a + j * size; }, at, size);
    add_products(last_x.rows, last_a.values[0], LANES, 0, acc);
  }
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int j = 0; j < RANKS; j++) {
      float lane[LANES];
      UNROLL for (int p = 0; p < PARTS; p++) store(lane + p * REGISTER_LANES, acc[r][j][p]);
      to[r][j] = sum(load<vf>(lane));
    }
}

template <class X, class A>
void shrink_rows(const LowRank& low, const AdapterRows::Block& block, int part, int first, int last,
                 const X* x, int64_t x_stride) {
  const int64_t size = low.inputs;
  const A* a = (const A*)low.a + ((int64_t)block.slot * low.num_parts + part) * low.max_rank * size;
  for (int done = 0; done < block.count; done += DOT_ROWS)
    with_rows<DOT_ROWS>(std::min(DOT_ROWS, block.count - done), [&](auto count) {
      constexpr int MR = decltype(count)::value;
      const X* from[MR];
      float* to[MR];
      const auto move_to = [&](int j) {
        for (int r = 0; r < MR; r++) to[r] = low.shrunk_of(block.rows[done + r], part) + j;
      };
      for (int r = 0; r < MR; r++) from[r] = x + block.rows[done + r] * x_stride;
      int j = first;
      for (; j + DOT_RANKS <= last; j += DOT_RANKS) {
        move_to(j);
        dot_rows<X, A, MR, DOT_RANKS>(from, a + j * size, size, to);
      }
      for (; j < last; j++) {
        move_to(j);
        dot_rows<X, A, MR, 1>(from, a + j * size, size, to);
      }
    });
}

template <class A>
void shrink_as(const LowRank& low, const AdapterRows::Block& block, int part, int first, int last,
               const void* x, bool x_is_bf16, int64_t x_stride) {
  if (x_is_bf16)
    shrink_rows<bf16, A>(low, block, part, first, last, (const bf16*)x, x_stride);
  else
    shrink_rows<float, A>(low, block, part, first, last, (const float*)x, x_stride);
}

// Position of a tile's vectors in a weight's columns.
struct Columns {
  int first[TILE_VECTORS], count[TILE_VECTORS];  // columns in the order of B; number of columns
  int part[TILE_VECTORS];                        // of the first one
  bool are_whole;  // every vector has 16 columns of one part and one block of B

  Columns(const LowRank& low, bool is_gated, int column) : are_whole(true) {
    const int half = low.outputs / 2;
    for (int v = 0; v < TILE_VECTORS; v++, column += LANES) {
      const int within = column / (2 * LANES) * LANES;
      const bool is_second = column / LANES % 2;
      first[v] = !is_gated ? column : is_second ? half + within : within;
      count[v] = std::clamp((is_gated ? half - within : low.outputs - column), 0, LANES);
      part[v] = low.part_of(first[v]);
      are_whole &= count[v] == LANES && first[v] + LANES <= low.bounds[part[v] + 1] &&
                   first[v] % LANES == 0;
    }
  }
};

// Ascending j, one accumulator for each sum.
template <class B, int MR>
void expand_rows(const LowRank& low, const Columns& columns, int adapter, int64_t row,
                 float* sums) {
  const int rank = low.ranks[adapter - 1], stride = low.stride;
  const B* b[TILE_VECTORS];
  const float* shrunk[TILE_VECTORS];
  rf acc[MR][TILE_VECTORS][PARTS];
  const auto sums_of = [&](int r, int v, int p) {
    return sums + r * TILE_COLUMNS + v * LANES + p * REGISTER_LANES;
  };
  UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
    b[v] = (const B*)low.b + low.column_of_b(adapter - 1, columns.first[v]);
    shrunk[v] = low.shrunk_of(row, columns.part[v]);
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int p = 0; p < PARTS; p++) acc[r][v][p] = load<rf>(sums_of(r, v, p));
  }
  for (int j = 0; j < rank; j++) {
    UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
      // Prefetch the next block of B while the other rows of this block are multiplied.
      __builtin_prefetch(b[v] + (low.max_rank + j) * LowRank::COLUMNS);
      UNROLL for (int p = 0; p < PARTS; p++) {
        const rf column = numbers(b[v] + j * LowRank::COLUMNS + p * REGISTER_LANES);
        UNROLL for (int r = 0; r < MR; r++)
          acc[r][v][p] = fma(spread(shrunk[v][r * stride + j]), column, acc[r][v][p]);
      }
    }
  }
  UNROLL for (int v = 0; v < TILE_VECTORS; v++)
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int p = 0; p < PARTS; p++) store(sums_of(r, v, p), acc[r][v][p]);
}

// One row, column by column: for vectors that span two parts or pass the last column.
template <class B>
void expand_singly(const LowRank& low, const Columns& columns, int adapter, int64_t row,
                   float* sums) {
  const int rank = low.ranks[adapter - 1];
  for (int v = 0; v < TILE_VECTORS; v++)
    for (int i = 0; i < columns.count[v]; i++) {
      const int column = columns.first[v] + i;
      const B* b = (const B*)low.b + low.column_of_b(adapter - 1, column);
      const float* shrunk = low.shrunk_of(row, low.part_of(column));
      for (int j = 0; j < rank; j++)
        sums[v * LANES + i] += shrunk[j] * number(b[j * LowRank::COLUMNS]);
    }
}

template <class B>
void expand_as(const Updates& updates, int64_t row, int num_rows, int column, float* sums) {
  const LowRank& low = updates.low;
  const int32_t* adapters = updates.adapters + row;
  if (std::all_of(adapters, adapters + num_rows, [](int32_t adapter) { return adapter == 0; }))
    return;
  const Columns columns(low, updates.is_gated, column);
  if (!columns.are_whole) {
    for (int r = 0; r < num_rows; r++)
      if (adapters[r]) expand_singly<B>(low, columns, adapters[r], row + r, sums + r * TILE_COLUMNS);
    return;
  }
  // Neighbouring rows of one adapter share reads of B.
  for (int r = 0, next; r < num_rows; r = next) {
    for (next = r + 1; next < num_rows && adapters[next] == adapters[r];) next++;
    if (adapters[r] == 0) continue;
    with_rows<TILE_ROWS>(next - r, [&](auto count) {
      expand_rows<B, decltype(count)::value>(low, columns, adapters[r], row + r,
                                             sums + r * TILE_COLUMNS);
    });
  }
}

}  // namespace

int LowRank::part_of(int column) const {
  int part = 0;
  while (part + 1 < num_parts && bounds[part + 1] <= column) part++;
  return part;
}

void AdapterRows::find(const int32_t* adapters, const int32_t* tokens, int num_rows) {
  adapters_.resize(num_rows);
  rows_.clear();
  blocks_.clear();
  for (int row = 0; row < num_rows; row++) {
    adapters_[row] = adapters[tokens ? tokens[row] : row];
    if (adapters_[row]) rows_.push_back(row);
  }
  std::stable_sort(rows_.begin(), rows_.end(),
                   [&](int32_t a, int32_t b) { return adapters_[a] < adapters_[b]; });
  const auto adapter_of = [&](size_t at) { return adapters_[rows_[at]]; };
  for (size_t first = 0, last; first < rows_.size(); first = last) {
    for (last = first + 1; last < rows_.size() && last - first < BLOCK;) {
      if (adapter_of(last) != adapter_of(first)) break;
      last++;
    }
    blocks_.push_back({adapter_of(first) - 1, &rows_[first], (int)(last - first)});
  }
}

void shrink(const LowRank& low, const AdapterRows::Block& block, int part, int first, int last,
            const void* x, bool x_is_bf16, int64_t x_stride,
            uint64_t stage) {
#if REMORA_TILES
  if (low.format == BF16)
    return shrink_by_tiles(low, block, part, first, last, x, x_is_bf16, x_stride, stage);
#endif
  with_number(low.format, [&](auto number) {
    shrink_as<decltype(number)>(low, block, part, first, last, x, x_is_bf16, x_stride);
  });
}

void shrink_one_hot(const LowRank& low, int adapter, int64_t row, int64_t input) {
  const int slot = adapter - 1;
  for (int part = 0; part < low.num_parts; part++) {
    int64_t at = ((int64_t)slot * low.num_parts + part) * low.max_rank * low.inputs + input;
    float* to = low.shrunk_of(row, part);
    for (int j = 0; j < low.ranks[slot]; j++, at += low.inputs)
      to[j] = number_at(low.format, low.a, at);
  }
}

void Updates::expand(int64_t row, int num_rows, int column, float* sums) const {
  with_number(low.format, [&](auto number) {
    expand_as<decltype(number)>(*this, row, num_rows, column, sums);
  });
}

}  // namespace remora
