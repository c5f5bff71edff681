#include "tile_low_rank.h"

#if REMORA_TILES

#include <algorithm>
#include <span>
#include <vector>

#include "bf16_rows.h"
#include "buffer.h"
#include "division.h"
#include "dot.h"

namespace remora {

namespace {

// So few rows are multiplied by vectors.
constexpr int FEW_ROWS = 4;

// The first of 16 columns of a panel, in the order of B.
int first_column(const Updates& updates, int panel, int vector) {
  const int column = panel * PANEL + vector * LANES;
  if (!updates.is_gated) return column;
  return column / (2 * LANES) * LANES + (vector % 2 ? updates.low.outputs / 2 : 0);
}

// The columns of B that multiply 16 columns of a weight, as right operands [ranks / 32][16][16 pairs].
struct Operand {
  int first, count;  // columns, in the order of B
  bf16* tiles;
};

// B of one adapter and some columns, arranged for tiles.
class ArrangedB {
 public:
  void arrange(const Updates& updates, const Columns& columns, int adapter, uint64_t stage) {
    const LowRank& low = updates.low;
    if (stage == stage_ && low.b == b_ && adapter == adapter_ && columns.panel == columns_.panel &&
        columns.first == columns_.first && columns.last == columns_.last)
      return;
    stage_ = stage, b_ = low.b, adapter_ = adapter, columns_ = columns;
    num_tiles_ = ceil_div(low.ranks[adapter - 1], DEPTH);
    const int64_t step = (int64_t)num_tiles_ * TILE_BYTES / sizeof(bf16);
    bf16* to = data_.reserve((columns.last - columns.first) * step);
    for (int vector = columns.first; vector < columns.last; vector++, to += step) {
      const int first = first_column(updates, columns.panel, vector);
      const int end = updates.is_gated && vector % 2 == 0 ? low.outputs / 2 : low.outputs;
      Operand& operand = operands_[vector];
      operand = {first, std::clamp(end - first, 0, LANES), to};
      fill(low, adapter - 1, operand, to);
    }
  }

  int num_tiles() const { return num_tiles_; }
  const Operand& operand(int vector) const { return operands_[vector]; }

 private:
  static void fill(const LowRank& low, int slot, const Operand& operand, bf16* to) {
    const int rank = low.ranks[slot];
    const bf16* b = (const bf16*)low.b;
    if (operand.count == LANES && operand.first % LANES == 0) {
      b += low.column_of_b(slot, operand.first);
      const bf16* next = b + low.max_rank * LowRank::COLUMNS;  // of the next panel
      for (int j = 0; j < rank; j += 2, to += 2 * LANES) {
        __builtin_prefetch(next + j * LowRank::COLUMNS, 0, 2);
        __builtin_prefetch(next + (j + 1) * LowRank::COLUMNS, 0, 2);
        const bf16* from = b + j * LowRank::COLUMNS;
        store(to, paired(load<vuh>(from), j + 1 < rank ? load<vuh>(from + LowRank::COLUMNS) : vuh{}));
      }
    } else {
      for (int j = 0; j < rank; j += 2, to += 2 * LANES) {
        vuh even = {}, odd = {};
        for (int i = 0; i < operand.count; i++) {
          const bf16* from = b + low.column_of_b(slot, operand.first + i) + j * LowRank::COLUMNS;
          even[i] = from[0], odd[i] = j + 1 < rank ? from[LowRank::COLUMNS] : 0;
        }
        store(to, paired(even, odd));
      }
    }
    std::fill(to, operand.tiles + ceil_div(rank, DEPTH) * TILE_SIDE * DEPTH, bf16(0));
  }

  static vi paired(vuh even, vuh odd) {
    return __builtin_convertvector(even, vi) | __builtin_convertvector(odd, vi) << 16;
  }

  uint64_t stage_ = 0;
  const void* b_ = nullptr;
  int adapter_ = 0, num_tiles_ = 0;
  Columns columns_{-1, 0, 0};
  Operand operands_[PANEL_VECTORS];
  Buffer<bf16> data_;
};

// Rows of a block that have one adapter: some of the places in the order of `AdapterRuns`.
struct Run {
  int adapter, first, count;
};

// Rows of A x in bf16, as left operands [parts][ranks / 32][rows][32]. Rows are sorted by adapter within
// their block of 16. Ranks past the last one of a row's adapter are 0.
class AdapterRuns {
 public:
  void arrange(const Updates& updates, int first, int last, uint64_t stage) {
    const LowRank& low = updates.low;
    if (stage == stage_ && low.shrunk == shrunk_ && first == first_ && last == last_) return;
    stage_ = stage, shrunk_ = low.shrunk, first_ = first, last_ = last;
    num_tiles_ = ceil_div(low.max_rank, DEPTH);
    num_rows_ = last - first + TILE_SIDE - 1;  // a tile of the last row reads further ones
    data_.reserve((size_t)low.num_parts * num_tiles_ * num_rows_ * DEPTH);
    runs_.clear(), rows_.clear(), starts_.assign(1, 0);
    for (int row = first; row < last; row += TILE_SIDE) {
      sort(updates.adapters, row, std::min(row + TILE_SIDE, last));
      starts_.push_back((int)runs_.size());
    }
    for (const Run& run : runs_) fill(low, run);
  }

  std::span<const Run> of_block(int row) const {
    const int block = (row - first_) / TILE_SIDE;
    return {runs_.data() + starts_[block], runs_.data() + starts_[block + 1]};
  }
  int row(int place) const { return rows_[place]; }
  bf16* tile(int part, int tile, int place) {
    return data_.data() + ((int64_t)(part * num_tiles_ + tile) * num_rows_ + place) * DEPTH;
  }

 private:
  void sort(const int32_t* adapters, int first, int last) {
    const size_t start = rows_.size();
    for (int row = first; row < last; row++)
      if (adapters[row]) rows_.push_back(row);
    std::stable_sort(rows_.begin() + start, rows_.end(),
                     [&](int a, int b) { return adapters[a] < adapters[b]; });
    for (int place = (int)start; place < (int)rows_.size(); place++) {
      const int adapter = adapters[rows_[place]];
      if (place == (int)start || adapter != runs_.back().adapter) runs_.push_back({adapter, place, 0});
      runs_.back().count++;
    }
  }

  void fill(const LowRank& low, const Run& run) {
    const int rank = low.ranks[run.adapter - 1];
    for (int place = run.first; place < run.first + run.count; place++)
      for (int part = 0; part < low.num_parts; part++)
        for (int at = 0; at < rank; at += DEPTH)
          store(tile(part, at / DEPTH, place),
                values_of(low.shrunk_of(rows_[place], part) + at, std::min(DEPTH, rank - at)));
  }

  uint64_t stage_ = 0;
  const void* shrunk_ = nullptr;
  int first_ = 0, last_ = 0, num_tiles_ = 0, num_rows_ = 0;
  std::vector<Run> runs_;
  std::vector<int> rows_, starts_;  // of each place; first run of each block
  Buffer<bf16> data_;
};

struct Scratch {
  ArrangedB b;
  AdapterRuns runs;
};
thread_local Scratch scratch;

// 32 adjacent columns of one part of a panel: where they are in B and in the sums.
struct Half {
  int column, part, vectors[2];
};

// The halves of a panel that are computed, or none if one has columns of two parts or of none.
struct Halves {
  Half all[2];
  int count = 0;

  Halves(const Updates& updates, const Columns& columns) {
    const LowRank& low = updates.low;
    for (int v = columns.first; v < columns.last; v += 2) {
      // Vectors of gated panels alternate.
      const int first = updates.is_gated ? v / 2 : v, step = updates.is_gated ? 2 : 1;
      const int column = first_column(updates, columns.panel, first), part = low.part_of(column);
      if (column % (2 * LANES) || column + 2 * LANES > low.bounds[part + 1]) {
        count = 0;
        return;
      }
      all[count++] = {column, part, {first, first + step}};
    }
  }
};

// sums += MR rows times 32 columns, in the order of tiles.
template <int MR>
__attribute__((noinline)) void expand_few(const bf16* b, const float* const* shrunk, int rank,
                                          float* const (*sums)[2]) {
  for (int start = 0; start < rank; start += DEPTH) {
    const int end = std::min(rank, start + DEPTH);
    vf even[MR][2] = {}, odd[MR][2] = {};
    int j = start;
    for (; j + 2 <= end; j += 2)
      UNROLL for (int v = 0; v < 2; v++) {
        const bf16* at = b + j * LowRank::COLUMNS + v * LANES;
        const vf first = widen(load<vuh>(at)), second = widen(load<vuh>(at + LowRank::COLUMNS));
        UNROLL for (int r = 0; r < MR; r++) {
          even[r][v] = fma(splat(shrunk[r][j]), first, even[r][v]);
          odd[r][v] = fma(splat(shrunk[r][j + 1]), second, odd[r][v]);
        }
      }
    if (j < end)
      UNROLL for (int v = 0; v < 2; v++) {
        const vf last = widen(load<vuh>(b + j * LowRank::COLUMNS + v * LANES));
        UNROLL for (int r = 0; r < MR; r++) even[r][v] = fma(splat(shrunk[r][j]), last, even[r][v]);
      }
    // Tiles add products with 0 for the ranks that remain.
    const vf rest = end - start < DEPTH ? vf{} : splat(-0.0f);
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int v = 0; v < 2; v++)
        store(sums[r][v], load<vf>(sums[r][v]) + ((even[r][v] + rest) + (odd[r][v] + rest)));
  }
}

// As `RunUpdate`, for few rows.
void add_few(const LowRank& low, const AdapterRuns& runs, const Run& run, int row, const Halves& halves,
             float* sums) {
  const int rank = low.ranks[run.adapter - 1];
  VectorsLikeTiles use;
  for (int h = 0; h < halves.count; h++) {
    const Half& half = halves.all[h];
    const bf16* b = (const bf16*)low.b + low.column_of_b(run.adapter - 1, half.column);
    for (int j = 0; j < rank; j++)  // of the next panel
      __builtin_prefetch(b + (low.max_rank + j) * LowRank::COLUMNS, 0, 2);
    const float* shrunk[FEW_ROWS];
    float* to[FEW_ROWS][2];
    for (int r = 0; r < run.count; r++) {
      const int at = runs.row(run.first + r);
      shrunk[r] = low.shrunk_of(at, half.part);
      for (int v = 0; v < 2; v++) to[r][v] = sums + (at - row) * PANEL + half.vectors[v] * LANES;
    }
    with_rows<FEW_ROWS>(run.count, [&](auto count) {
      expand_few<decltype(count)::value>(b, shrunk, rank, to);
    });
  }
}

// Adds the update of one adapter to the sums [rows][64] of its rows, which are in a block that begins
// with `row`. A vector of 16 columns uses registers of its own.
struct RunUpdate {
  const LowRank& low;
  const ArrangedB& b;
  AdapterRuns& runs;
  const Run& run;
  int row;
  bool is_whole;  // all rows of the block have this adapter

  // Columns of one operand can belong to several parts.
  template <int VECTOR>
  void add(float* sums) {
    const Operand& operand = b.operand(VECTOR);
    sums += VECTOR * LANES;
    for (int done = 0, next; done < operand.count; done = next) {
      const int part = low.part_of(operand.first + done);
      next = std::min(operand.count, low.bounds[part + 1] - operand.first);
      if (is_whole && next - done == LANES) {
        multiply<VECTOR>(part, operand, sums, PANEL * sizeof(float));
        continue;
      }
      alignas(64) float copy[TILE_SIDE][LANES];
      for (int r = 0; r < run.count; r++) store(copy[r], load<vf>(sums_of(sums, r)));
      multiply<VECTOR>(part, operand, copy[0], TILE_ROW_BYTES);
      for (int r = 0; r < run.count; r++)
        if (next - done == LANES)
          store(sums_of(sums, r), load<vf>(copy[r]));
        else
          std::copy(copy[r] + done, copy[r] + next, sums_of(sums, r) + done);
    }
  }

 private:
  float* sums_of(float* sums, int r) const {
    return sums + (runs.row(run.first + r) - row) * PANEL;
  }

  template <int VECTOR>
  INLINE void multiply(int part, const Operand& operand, float* sums, int64_t stride) {
    load_tile<SUMS + VECTOR>(sums, stride);
    for (int tile = 0; tile < b.num_tiles(); tile++) {
      load_tile<LEFT + VECTOR % 2>(runs.tile(part, tile, run.first), TILE_ROW_BYTES);
      load_tile<RIGHT + VECTOR % 2>(operand.tiles + tile * TILE_SIDE * DEPTH, TILE_ROW_BYTES);
      dot_tiles_bf16<SUMS + VECTOR, LEFT + VECTOR % 2, RIGHT + VECTOR % 2>();
    }
    store_tile<SUMS + VECTOR>(sums, stride);
  }
};

}  // namespace

void arrange_shrunk(const Updates& updates, int first, int last, uint64_t stage) {
  scratch.runs.arrange(updates, first, last, stage);
}

void expand_by_tiles(const Updates& updates, const Columns& columns, int row, int num_rows,
                     uint64_t stage, float* sums) {
  static_assert(PANEL_VECTORS == 4);
  const LowRank& low = updates.low;
  auto& b = scratch.b;
  auto& runs = scratch.runs;
  const Halves halves(updates, columns);
  for (const Run& run : runs.of_block(row)) {
    const int rank = low.ranks[run.adapter - 1];
    if (rank == 0) continue;
    if (VectorsLikeTiles::EXIST && run.count <= FEW_ROWS && halves.count > 0) {
      add_few(low, runs, run, row, halves, sums);
      continue;
    }
    b.arrange(updates, columns, run.adapter, stage);
    RunUpdate update{low, b, runs, run, row, run.count == num_rows};
    const auto has = [&](int vector) { return columns.first <= vector && vector < columns.last; };
    if (has(0)) update.add<0>(sums);
    if (has(1)) update.add<1>(sums);
    if (has(2)) update.add<2>(sums);
    if (has(3)) update.add<3>(sums);
  }
}

}  // namespace remora

#endif
