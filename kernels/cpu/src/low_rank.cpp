#include "low_rank.h"

#include <algorithm>

#include "dot.h"

namespace remora {

namespace {

// How many rows of x and of A are multiplied with each other at a time.
#if defined(__AVX512F__)
constexpr int DOT_ROWS = 4, DOT_RANKS = 4;
#else
constexpr int DOT_ROWS = 2, DOT_RANKS = 2;
#endif

INLINE float number(float x) { return x; }
INLINE float number(bf16 x) { return widen(x); }
INLINE vf numbers(const float* from) { return load<vf>(from); }
INLINE vf numbers(const bf16* from) { return widen(load<vuh>(from)); }

struct Whole {
  template <class T>
  INLINE vf operator()(const T* from) const { return numbers(from); }
};

// The first `count` of a vector, then zeros.
struct First {
  int count;
  template <class T>
  INLINE vf operator()(const T* from) const {
    T part[LANES] = {};
    for (int i = 0; i < count; i++) part[i] = from[i];
    return numbers(part);
  }
};

template <class Read, class X, class A, int MR, int RANKS>
INLINE void add_products(Read read, const X* const* x, const A* a, int64_t size, int64_t at,
                         vf (&acc)[MR][RANKS]) {
  vf value[MR];
  UNROLL for (int r = 0; r < MR; r++) value[r] = read(x[r] + at);
  UNROLL for (int j = 0; j < RANKS; j++) {
    const vf weight = read(a + j * size + at);
    UNROLL for (int r = 0; r < MR; r++) acc[r][j] = fma(value[r], weight, acc[r][j]);
  }
}

// MR rows of x times RANKS rows of A: 16 partial sums each over ascending k, then those.
template <class X, class A, int MR, int RANKS>
INLINE void dot_rows(const X* const* x, const A* a, int64_t size, float* const* to) {
  vf acc[MR][RANKS] = {};
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) add_products(Whole{}, x, a, size, at, acc);
  if (at < size) add_products(First{(int)(size - at)}, x, a, size, at, acc);
  UNROLL for (int r = 0; r < MR; r++)
    UNROLL for (int j = 0; j < RANKS; j++) to[r][j] = sum(acc[r][j]);
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

// Where the vectors of a tile lie among a weight's columns.
struct Columns {
  int first[TILE_VECTORS], count[TILE_VECTORS];  // columns in the order of B, those that there are
  int part[TILE_VECTORS];                        // of the first one
  bool are_whole;                                // no vector has fewer than 16, or of two parts

  Columns(const LowRank& low, bool is_gated, int column) : are_whole(true) {
    const int half = low.outputs / 2;
    for (int v = 0; v < TILE_VECTORS; v++, column += LANES) {
      const int within = column / (2 * LANES) * LANES;
      const bool is_second = column / LANES % 2;
      first[v] = !is_gated ? column : is_second ? half + within : within;
      count[v] = std::clamp((is_gated ? half - within : low.outputs - column), 0, LANES);
      part[v] = low.part_of(first[v]);
      are_whole &= count[v] == LANES && first[v] + LANES <= low.bounds[part[v] + 1];
    }
  }
};

// Ascending j, one accumulator for each sum.
template <class B, int MR>
void expand_rows(const LowRank& low, const Columns& columns, int adapter, int64_t row, vf* sums) {
  const int rank = low.ranks[adapter - 1];
  const B* b = (const B*)low.b + (int64_t)(adapter - 1) * low.max_rank * low.outputs;
  const float* shrunk[TILE_VECTORS];
  vf acc[MR][TILE_VECTORS];
  UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
    shrunk[v] = low.shrunk_of(row, columns.part[v]);
    UNROLL for (int r = 0; r < MR; r++) acc[r][v] = sums[r * TILE_VECTORS + v];
  }
  for (int j = 0; j < rank; j++, b += low.outputs) {
    UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
      const vf column = numbers(b + columns.first[v]);
      UNROLL for (int r = 0; r < MR; r++)
        acc[r][v] = fma(splat(shrunk[v][r * low.stride + j]), column, acc[r][v]);
    }
  }
  UNROLL for (int v = 0; v < TILE_VECTORS; v++)
    UNROLL for (int r = 0; r < MR; r++) sums[r * TILE_VECTORS + v] = acc[r][v];
}

// One row, column by column: for vectors that lie in two parts, or beyond the last column.
template <class B>
void expand_singly(const LowRank& low, const Columns& columns, int adapter, int64_t row, vf* sums) {
  const int rank = low.ranks[adapter - 1];
  const B* b = (const B*)low.b + (int64_t)(adapter - 1) * low.max_rank * low.outputs;
  for (int v = 0; v < TILE_VECTORS; v++) {
    float lane[LANES];
    store(lane, sums[v]);
    for (int i = 0; i < columns.count[v]; i++) {
      const int column = columns.first[v] + i;
      const float* shrunk = low.shrunk_of(row, low.part_of(column));
      for (int j = 0; j < rank; j++)
        lane[i] += shrunk[j] * number(b[(int64_t)j * low.outputs + column]);
    }
    sums[v] = load<vf>(lane);
  }
}

template <class B>
void expand_as(const Updates& updates, int64_t row, int num_rows, int column, vf* sums) {
  const LowRank& low = updates.low;
  const int32_t* adapters = updates.adapters + row;
  if (std::all_of(adapters, adapters + num_rows, [](int32_t adapter) { return adapter == 0; }))
    return;
  const Columns columns(low, updates.is_gated, column);
  if (!columns.are_whole) {
    for (int r = 0; r < num_rows; r++)
      if (adapters[r]) expand_singly<B>(low, columns, adapters[r], row + r, sums + r * TILE_VECTORS);
    return;
  }
  // Neighbours of the same adapter share the reading of B.
  for (int r = 0, next; r < num_rows; r = next) {
    for (next = r + 1; next < num_rows && adapters[next] == adapters[r];) next++;
    if (adapters[r] == 0) continue;
    with_rows<TILE_ROWS>(next - r, [&](auto count) {
      expand_rows<B, decltype(count)::value>(low, columns, adapters[r], row + r,
                                             sums + r * TILE_VECTORS);
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
            const void* x, bool x_is_bf16, int64_t x_stride) {
  if (low.is_bf16)
    shrink_as<bf16>(low, block, part, first, last, x, x_is_bf16, x_stride);
  else
    shrink_as<float>(low, block, part, first, last, x, x_is_bf16, x_stride);
}

void shrink_one_hot(const LowRank& low, int adapter, int64_t row, int64_t input) {
  const int slot = adapter - 1;
  for (int part = 0; part < low.num_parts; part++) {
    int64_t at = ((int64_t)slot * low.num_parts + part) * low.max_rank * low.inputs + input;
    float* to = low.shrunk_of(row, part);
    for (int j = 0; j < low.ranks[slot]; j++, at += low.inputs)
      to[j] = low.is_bf16 ? number(((const bf16*)low.a)[at]) : ((const float*)low.a)[at];
  }
}

void Updates::expand(int64_t row, int num_rows, int column, vf* sums) const {
  if (low.is_bf16)
    expand_as<bf16>(*this, row, num_rows, column, sums);
  else
    expand_as<float>(*this, row, num_rows, column, sums);
}

}  // namespace remora
