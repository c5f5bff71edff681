#include <sys/mman.h>
#include <unistd.h>

#include <cmath>

#include "linear.h"

namespace remora {

namespace {

// Rows of a checkpoint's weight, read as floats; zeros outside.
struct Source {
  const void* from;
  Format format;
  int n, k;
  bool gated;

  // The source row of this column of the packed weight, or -1.
  int row_of(int column) const {
    if (!gated) return column < n ? column : -1;
    const int size = n / 2, within = column / (2 * LANES) * LANES + column % LANES;
    if (within >= size) return -1;
    return column / LANES % 2 ? size + within : within;
  }

  float at(int row, int at_k) const {
    if (row < 0 || at_k >= k) return 0.0f;
    return number_at(format, from, (int64_t)row * k + at_k);
  }
};

// One column's values of one group.
template <int SIZE>
struct Values {
  float value[SIZE], least, most;

  Values(const Source& source, int row, int start) {
    float unfit = 0;  // NaN from NaN and infinity, which comparisons would drop
    for (int i = 0; i < SIZE; i++) unfit += 0.0f * (value[i] = source.at(row, start + i));
    least = most = value[0] + unfit;
    for (int i = 1; i < SIZE; i++) {
      least = value[i] < least ? value[i] : least;
      most = value[i] > most ? value[i] : most;  // NaN stays
    }
  }

  // round((value - offset) / scale), kept within [low, high]
  int level(int i, float offset, float scale, int low, int high) const {
    const float exact = scale > 0 ? (value[i] - offset) / scale : 0.0f;
    const float kept = exact < low ? low : exact > high ? high : exact;
    return (int)__builtin_rintf(kept);
  }
};

void pack_bf16_column(const Source& source, int row, int column, char* panel) {
  const int padded = padded_k(BF16, source.k);
  const auto place = [&](int i) { return panel + step_offset(BF16, padded / 2, i / 2, column); };
  if (source.format == BF16 && row >= 0 && source.k == padded) {  // copied unchanged, two values at a time
    const auto* pairs = (const char*)source.from + (int64_t)row * source.k * 2;
    for (int i = 0; i < padded; i += 2) __builtin_memcpy(place(i), pairs + i * 2, 4);
    return;
  }
  for (int i = 0; i < padded; i++) ((bf16*)place(i))[i % 2] = narrow(source.at(row, i));
}

void pack_f16_column(const Source& source, int row, int column, f16* panel) {
  if (source.format == F16 && row >= 0) {  // copied unchanged
    const f16* values = (const f16*)source.from + (int64_t)row * source.k;
    for (int i = 0; i < source.k; i++) panel[i * PANEL + column] = values[i];
    return;
  }
  for (int i = 0; i < source.k; i++) panel[i * PANEL + column] = narrow_f16(source.at(row, i));
}

// The scale is rounded before the division, so its rounding adds no error.
void pack_q8_column(const Source& source, int row, int start, int column, char* group) {
  const Values<64> values(source, row, start);
  const bf16 stored = narrow(fmaxf(values.most, -values.least) / 127.0f);
  ((bf16*)group)[column] = stored;
  constexpr int OFFSET = HAS_TILES ? 0 : 128;
  auto* data = (uint8_t*)group + 2 * PANEL;
  for (int i = 0; i < 64; i++)
    data[step_offset(Q8, 16, i / 4, column) + i % 4] =
        (uint8_t)(values.level(i, 0.0f, widen(stored), -127, 127) + OFFSET);
}

// Scale and least of a group of Q4, as they are stored.
struct Q4Grid {
  bf16 scale, least;
};

// Searches the grid with the least squared error of a group: starts from the group's full range and
// from narrower ones, and fits scale and least to the levels that each of them gives.
class Q4Search {
 public:
  // number: values that are not padding
  Q4Search(const Values<32>& values, int number) : values_(values), number_((float)number) {
    float is_real[32];
    for (int i = 0; i < 32; i++) is_real[i] = i < number ? 1.0f : 0.0f;
    for (int v = 0; v < VECTORS; v++) {
      total_ += part_[v] = load<vf>(values.value + v * LANES);
      is_real_[v] = load<vf>(is_real + v * LANES);
    }
  }

  Q4Grid best() const {
    const bf16 least = narrow(values_.least);
    Q4Grid found{narrow((values_.most - widen(least)) / 15.0f), least};
    float lowest = error(found);
    const float middle = (values_.least + values_.most) / 2;
    for (int step = 0; step < STEPS; step++) {
      const float half = (values_.most - values_.least) / 2 * (1.0f - SHRINKING * (float)step);
      const Q4Grid tried = fitted(half * 2 / 15.0f, middle - half);
      const float lost = error(tried);
      if (lost < lowest) {  // false for NaN, which stays in the first grid
        lowest = lost;
        found = tried;
      }
    }
    return found;
  }

 private:
  static constexpr int VECTORS = 32 / LANES, STEPS = 12;
  static constexpr float SHRINKING = 0.03f;

  vf level(int v, float scale, float least) const {
    const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    const vf exact = (part_[v] - splat(least)) * splat(inverse);
    return to_float(round_to_int(min(splat(15.0f), max(splat(0.0f), exact))));
  }

  float error(Q4Grid grid) const {
    const float scale = widen(grid.scale), least = widen(grid.least);
    vf squares = {};
    for (int v = 0; v < VECTORS; v++) {
      const vf off = fma(level(v, scale, least), splat(scale), splat(least)) * is_real_[v] - part_[v];
      squares = fma(off, off, squares);
    }
    return sum(squares);
  }

  // Least squares, for the levels of this grid. The scale makes up for the rounding of least.
  Q4Grid fitted(float scale, float least) const {
    vf levels = {}, squares = {}, products = {};
    for (int v = 0; v < VECTORS; v++) {
      const vf one = level(v, scale, least) * is_real_[v];
      levels += one;
      squares = fma(one, one, squares);
      products = fma(one, part_[v], products);
    }
    const float of_levels = sum(levels), of_values = sum(total_);
    const float of_squares = sum(squares), of_products = sum(products);
    const float spread = number_ * of_squares - of_levels * of_levels;
    if (spread <= 0) return {narrow(scale), narrow(least)};
    const float slope = (number_ * of_products - of_levels * of_values) / spread;
    const bf16 stored = narrow((of_values - slope * of_levels) / number_);
    return {narrow((of_products - widen(stored) * of_levels) / of_squares), stored};
  }

  const Values<32>& values_;
  const float number_;
  vf part_[VECTORS], is_real_[VECTORS], total_ = {};
};

void pack_q4_column(const Source& source, int row, int start, int column, char* group) {
  const Values<32> values(source, row, start);
  const Q4Grid grid = Q4Search(values, source.k - start < 32 ? source.k - start : 32).best();
  ((bf16*)group)[column] = grid.scale;
  ((bf16*)group)[PANEL + column] = grid.least;
  auto* data = (uint8_t*)group + 4 * PANEL;
  for (int i = 0; i < 32; i++) {
    uint8_t& byte = data[step_offset(Q4, 4, i / 8, column) + i % 4];
    const auto level = (uint8_t)values.level(i, widen(grid.least), widen(grid.scale), 0, 15);
    byte = i % 8 < 4 ? level : (uint8_t)(byte | level << 4);
  }
}

}  // namespace

void pack_panel(Format format, const void* from, Format source_format, int n, int k, bool gated,
                int panel, char* to) {
  const Source source{from, source_format, n, k, gated};
  const int padded = padded_k(format, k);
  for (int column = 0; column < PANEL; column++) {
    const int row = source.row_of(panel * PANEL + column);
    if (format == F32) {
      for (int i = 0; i < padded; i++) ((float*)to)[i * PANEL + column] = source.at(row, i);
    } else if (format == BF16) {
      pack_bf16_column(source, row, column, to);
    } else if (format == F16) {
      pack_f16_column(source, row, column, (f16*)to);
    } else {
      const int size = group_size(format), bytes = (int)(panel_bytes(format, size));
      for (int start = 0; start < padded; start += size) {
        char* group = to + (int64_t)(start / size) * bytes;
        (format == Q8 ? pack_q8_column : pack_q4_column)(source, row, start, column, group);
      }
    }
  }
}

void give_back_panel(const void* from, Format source, int n, int k, bool gated, int panel) {
  const int ranges = gated ? 2 : 1, size = n / ranges, rows = PANEL / ranges;
  const int first = panel * rows, last = first + rows < size ? first + rows : size;
  const auto page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t row_bytes = (uintptr_t)k * number_bytes(source);
  for (int range = 0; range < ranges; range++) {
    const uintptr_t start = (uintptr_t)from + range * size * row_bytes;
    const uintptr_t begin = (start + first * row_bytes + page - 1) / page * page;
    const uintptr_t end = (start + last * row_bytes) / page * page;
    if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
  }
}

void quantize_row(const float* x, int k, int group, int8_t* values, int padded, float* scales,
                  int32_t* sums) {
  for (int start = 0, at = 0; start < padded; start += group, at++) {
    vf part[4], top = {}, unfit = {};
    const int vectors = group / LANES;
    for (int v = 0; v < vectors; v++) {
      const int from = start + v * LANES;
      if (from + LANES <= k) {
        part[v] = load<vf>(x + from);
      } else {
        float tail[LANES] = {};
        for (int i = from; i < k; i++) tail[i - from] = x[i];
        part[v] = load<vf>(tail);
      }
      top = max(top, absolute(part[v]));
      unfit += part[v] * 0.0f;  // NaN from NaN and infinity, which maxima may drop
    }
    const float most = max_lane(top) + sum(unfit);
    const vf inverse = splat(most > 0 ? 127.0f / most : 0.0f);
    vi total = {};
    for (int v = 0; v < vectors; v++) {
      const vi rounded = round_to_int(part[v] * inverse);
      total += rounded;
      store(values + start + v * LANES, __builtin_convertvector(rounded, vb));
    }
    scales[at] = most / 127.0f;
    int32_t lane[LANES], sum = 0;
    store(lane, total);
    for (int i = 0; i < LANES; i++) sum += lane[i];
    sums[at] = sum;
  }
}

}  // namespace remora
