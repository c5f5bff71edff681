#include <sys/mman.h>
#include <unistd.h>

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

// One column's values of a group of whole bytes.
template <int SIZE>
struct Values {
  float value[SIZE], most;  // the greatest magnitude

  Values(const Source& source, int row, int start) {
    float unfit = 0;  // NaN from NaN and infinity, which comparisons would drop
    for (int i = 0; i < SIZE; i++) unfit += 0.0f * (value[i] = source.at(row, start + i));
    most = unfit;
    for (int i = 0; i < SIZE; i++)
      most = __builtin_fabsf(value[i]) > most ? __builtin_fabsf(value[i]) : most;  // NaN stays
  }

  // round(value / scale), kept within +-127
  int level(int i, float scale) const {
    const float exact = scale > 0 ? value[i] / scale : 0.0f;
    const float kept = exact < -127 ? -127 : exact > 127 ? 127 : exact;
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

// The scale of a group, narrowed, and as it will be read: it is rounded before values are divided by it,
// so that its rounding adds no error.
float narrowed_scale(float most, bf16& stored) {
  stored = narrow(most / 127.0f);
  return widen(stored);
}

// Below the normal numbers of f16 a scale is rounded up where `most` would lie beyond the last level,
// 127, by more than half a level.
float narrowed_scale(float most, f16& stored) {
  stored = narrow_f16(most / 127.0f);
  if (number_at(F16, &stored, 0) * 127.5f < most) stored.bits++;
  return number_at(F16, &stored, 0);
}

template <Format FORMAT>  // Q8 or Q8_0
void pack_bytes_column(const Source& source, int row, int start, int column, char* group) {
  typedef std::conditional_t<FORMAT == Q8, bf16, f16> Scale;
  constexpr int SIZE = FORMAT == Q8 ? 64 : 32;
  const Values<SIZE> values(source, row, start);
  const float scale = narrowed_scale(values.most, ((Scale*)group)[column]);
  constexpr int OFFSET = HAS_TILES ? 0 : 128;
  auto* data = (uint8_t*)group + 2 * PANEL;
  for (int i = 0; i < SIZE; i++)
    data[step_offset(FORMAT, SIZE / 4, i / 4, column) + i % 4] =
        (uint8_t)(values.level(i, scale) + OFFSET);
}

// A group of Q4 or Q5_1 in LANES columns: a vector for each k.
template <Format FORMAT>
class Columns {
 public:
  Columns(const Source& source, int panel_column, int start) {
    float lane[SIZE][LANES];
    for (int column = 0; column < LANES; column++) {
      const int row = source.row_of(panel_column + column);
      for (int i = 0; i < SIZE; i++) lane[i][column] = source.at(row, start + i);
    }
    number_ = source.k - start < SIZE ? source.k - start : SIZE;
    vf unfit = {};  // NaN from NaN and infinity, which minima would drop
    for (int i = 0; i < SIZE; i++) {
      value_[i] = load<vf>(lane[i]);
      unfit += value_[i] * 0.0f;
    }
    least_ = most_ = value_[0] + unfit;
    for (int i = 1; i < SIZE; i++) {
      least_ = min(value_[i], least_);
      most_ = max(value_[i], most_);
      total_ += value_[i];
    }
    total_ += value_[0];
  }

  // Writes a group's scales, minima and codes to those of the panel, from `column` on.
  void pack(char* group, int column) const {
    const Grid grid = best();
    store((uint16_t*)group + column, narrowed(grid.scale));
    store((uint16_t*)group + PANEL + column, narrowed(FORMAT == Q4 ? grid.least : -grid.least));
    vi word[WORDS] = {};
    for (int i = 0; i < SIZE; i++) {
      const vi code = round_to_int(level(i, grid)) & TOP;
      word[NIBBLES + i / 8] |= (code & 15) << (i % 4 * 8 + i / 4 % 2 * 4);
      if constexpr (FORMAT == Q5_1) word[0] |= code >> 4 << (i % 4 * 8 + i / 4);
    }
    for (int i = 0; i < WORDS; i++)
      store(group + 4 * PANEL + step_offset(FORMAT, WORDS, i, column), word[i]);
  }

 private:
  static constexpr int SIZE = 32, STEPS = 12, NIBBLES = FORMAT == Q4 ? 0 : 1, WORDS = NIBBLES + 4;
  static constexpr int TOP = FORMAT == Q4 ? 15 : 31;  // the last code
  static constexpr float SHRINKING = 0.03f;

  // What codes stand for: scale * code + least.
  struct Grid {
    vf scale, least, inverse;

    Grid(vf scale, vf least)
        : scale(scale), least(least), inverse(scale > 0.0f ? 1.0f / scale : vf{}) {}
  };

  // The grid with the least squared error of those of the full range, and of narrower ranges with
  // scale and least fitted to the levels that each gives. Five bits try four bits' levels, too:
  // many models were made from 4-bit weights, which these find again.
  Grid best() const {
    const vf least = rounded(least_);
    Grid found(rounded((most_ - least) / (float)TOP), least);
    vf lowest = error(found);
    const auto attempt = [&](float share, int top) {
      const vf middle = (least_ + most_) / 2.0f, half = (most_ - least_) / 2.0f * share;
      const Grid tried = fitted(Grid(half * 2.0f / (float)top, middle - half));
      const vf lost = error(tried);
      const vi is_better = lost < lowest;  // false for NaN, which stays in the first grid
      lowest = is_better ? lost : lowest;
      found = Grid(is_better ? tried.scale : found.scale, is_better ? tried.least : found.least);
    };
    for (int step = 0; step < STEPS; step++) attempt(1.0f - SHRINKING * (float)step, TOP);
    if constexpr (FORMAT == Q5_1) attempt(1.0f, 15);
    return found;
  }

  // To the numbers of stored scales.
  static vuh narrowed(vf x) { return FORMAT == Q4 ? narrow(x) : narrow_f16(x); }
  static vf rounded(vf x) { return FORMAT == Q4 ? widen(narrow(x)) : widen_f16(narrow_f16(x)); }

  // The level of a value, not yet rounded.
  vf level(int i, const Grid& grid) const {
    return min(splat((float)TOP), max(vf{}, (value_[i] - grid.least) * grid.inverse));
  }

  vf error(const Grid& grid) const {
    vf squares = {};
    for (int i = 0; i < number_; i++) {
      const vf off = fma(whole(level(i, grid)), grid.scale, grid.least) - value_[i];
      squares = fma(off, off, squares);
    }
    return squares;
  }

  // Least squares, for the levels of this grid. The scale makes up for the rounding of least.
  Grid fitted(const Grid& grid) const {
    vf levels = {}, squares = {}, products = {};
    for (int i = 0; i < number_; i++) {
      const vf one = whole(level(i, grid));
      levels += one;
      squares = fma(one, one, squares);
      products = fma(one, value_[i], products);
    }
    const auto number = (float)number_;
    const vf spread = squares * number - levels * levels;
    const vf slope = (products * number - levels * total_) / spread;
    const vf least = rounded((total_ - slope * levels) / number);
    const vf scale = rounded((products - least * levels) / squares);
    const vi is_spread = spread > 0.0f;
    return Grid(is_spread ? scale : rounded(grid.scale), is_spread ? least : rounded(grid.least));
  }

  // The nearest integer, ties to even; good for |x| < 2^22.
  static vf whole(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: a sum with it has no fraction
    return x + magic - magic;
  }

  int number_;  // values that are not padding
  vf value_[SIZE], least_, most_, total_ = {};
};

template <Format FORMAT>
void pack_columns(const Source& source, int panel, char* to) {
  constexpr int SIZE = 32;
  for (int start = 0; start < source.k; start += SIZE, to += panel_bytes(FORMAT, SIZE))
    for (int column = 0; column < PANEL; column += LANES)
      Columns<FORMAT>(source, panel * PANEL + column, start).pack(to, column);
}

}  // namespace

void pack_panel(Format format, const void* from, Format source_format, int n, int k, bool gated,
                int panel, char* to) {
  const Source source{from, source_format, n, k, gated};
  const int padded = padded_k(format, k);
  if (format == Q4) return pack_columns<Q4>(source, panel, to);
  if (format == Q5_1) return pack_columns<Q5_1>(source, panel, to);
  for (int column = 0; column < PANEL; column++) {
    const int row = source.row_of(panel * PANEL + column);
    if (format == F32) {
      for (int i = 0; i < padded; i++) ((float*)to)[i * PANEL + column] = source.at(row, i);
    } else if (format == BF16) {
      pack_bf16_column(source, row, column, to);
    } else if (format == F16) {
      pack_f16_column(source, row, column, (f16*)to);
    } else {
      const int size = group_size(format);
      const auto pack = format == Q8 ? pack_bytes_column<Q8> : pack_bytes_column<Q8_0>;
      for (int start = 0; start < padded; start += size)
        pack(source, row, start, column, to + start / size * panel_bytes(format, size));
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

// One group of VECTORS vectors of a row of k floats, from `start` on.
template <int VECTORS>
static INLINE void quantize_group(const float* x, int k, int start, int8_t* values, float* scale,
                                  int32_t* sum_of_values) {
  constexpr int N = VECTORS * PARTS;
  float padded[VECTORS * LANES];
  const float* from = x + start;
  if (start + VECTORS * LANES > k) {
    for (int i = 0; i < VECTORS * LANES; i++) padded[i] = start + i < k ? from[i] : 0.0f;
    from = padded;
  }
  rf part[N], top[PARTS] = {}, unfit[PARTS] = {};
  UNROLL for (int i = 0; i < N; i++) {
    part[i] = load<rf>(from + i * REGISTER_LANES);
    top[i % PARTS] = max(top[i % PARTS], (rf)((ri)part[i] & 0x7fffffff));
    unfit[i % PARTS] += part[i] * 0.0f;  // NaN from NaN and infinity, which maxima may drop
  }
  const float most = max_lane(load<vf>(top)) + sum(load<vf>(unfit));
  const rf inverse = spread(most > 0 ? 127.0f / most : 0.0f);
  ri rounded[N], total = {};
  UNROLL for (int i = 0; i < N; i++) {
    rounded[i] = round_to_int(part[i] * inverse);
    total += rounded[i];
  }
  UNROLL for (int v = 0; v < VECTORS; v++)
    store(values + start + v * LANES, to_bytes(load<vi>(rounded + v * PARTS)));
  *scale = most / 127.0f;
  *sum_of_values = sum(total);
}

void quantize_row(const float* x, int k, int group, int8_t* values, int padded, float* scales,
                  int32_t* sums) {
  for (int start = 0, at = 0; start < padded; start += group, at++) {
    if (group == LANES)
      quantize_group<1>(x, k, start, values, scales + at, sums + at);
    else if (group == 2 * LANES)
      quantize_group<2>(x, k, start, values, scales + at, sums + at);
    else
      quantize_group<4>(x, k, start, values, scales + at, sums + at);
  }
}

}  // namespace remora
