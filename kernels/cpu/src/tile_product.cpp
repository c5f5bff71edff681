#include "tile_product.h"

#if REMORA_TILES

#include <algorithm>
#include <vector>

#include "dot.h"

namespace remora {

namespace {

constexpr int PANEL_STRIDE = PANEL * 4;  // bytes between a panel's steps of k
// Bytes along k of a packed row and of a panel's column that stay in the first-level cache.
constexpr int BLOCK_DEPTH = 1024;

// Rows of a chunk in the order in which tiles read them: blocks of 16 rows, and within a block one
// tile of 16 x `depth` bytes after the other. Rows past the last one are zeros.
class PackedRows {
 public:
  void pack(const Rows& x, int item, int size, int depth, int first, int last, uint64_t stage) {
    if (stage == stage_ && x.values == values_ && first == first_ && last == last_) return;
    stage_ = stage, values_ = x.values, first_ = first, last_ = last;
    const int row_bytes = size * item;
    num_tiles_ = (row_bytes + depth - 1) / depth;
    depth_ = depth;
    data_.assign((size_t)num_blocks() * TILE_SIDE * num_tiles_ * depth, 0);
    if (depth == TILE_ROW_BYTES)
      copy<TILE_ROW_BYTES>((const char*)x.values, (int64_t)x.stride * item, row_bytes);
    else
      copy<TILE_ROW_BYTES / 2>((const char*)x.values, (int64_t)x.stride * item, row_bytes);
  }

  int num_rows() const { return last_ - first_; }
  int num_blocks() const { return (num_rows() + TILE_SIDE - 1) / TILE_SIDE; }
  int num_tiles() const { return num_tiles_; }
  int rows_of(int block) const { return std::min(TILE_SIDE, num_rows() - block * TILE_SIDE); }
  const char* tile(int block, int at) const {
    return data_.data() + ((int64_t)block * num_tiles_ + at) * TILE_SIDE * depth_;
  }

 private:
  // DEPTH is a constant so that whole pieces are copied by vectors.
  template <int DEPTH>
  void copy(const char* values, int64_t stride, int row_bytes) {
    for (int row = 0; row < num_rows(); row++) {
      const char* from = values + (first_ + row) * stride;
      char* to = const_cast<char*>(tile(row / TILE_SIDE, 0)) + row % TILE_SIDE * DEPTH;
      int at = 0;
      for (; at + DEPTH <= row_bytes; at += DEPTH, to += TILE_SIDE * DEPTH)
        __builtin_memcpy(to, from + at, DEPTH);
      memcpy(to, from + at, row_bytes - at);
    }
  }

  uint64_t stage_ = 0;
  const void* values_ = nullptr;
  int first_ = 0, last_ = 0, num_tiles_ = 0, depth_ = 0;
  std::vector<char> data_;
};

// Buffers of one thread.
struct Scratch {
  PackedRows rows;
  std::vector<float> sums;  // [rows, whole blocks][64]
};
thread_local Scratch scratch;

// Stores the sums of one block of rows.
void write_block(const Writer& to, int panel, int row, int num_rows, const float* sums) {
  for (int done = 0; done < num_rows; done += TILE_ROWS)
    with_rows<TILE_ROWS>(std::min(TILE_ROWS, num_rows - done), [&](auto count) {
      constexpr int MR = decltype(count)::value;
      for (int vector = 0; vector < PANEL_VECTORS; vector += TILE_VECTORS) {
        vf acc[MR][TILE_VECTORS];
        UNROLL for (int r = 0; r < MR; r++)
          UNROLL for (int v = 0; v < TILE_VECTORS; v++)
            acc[r][v] = load<vf>(sums + (done + r) * PANEL + (vector + v) * LANES);
        to.write_tile<MR, TILE_VECTORS>(row + done, panel * PANEL + vector * LANES, acc);
      }
    });
}

// Sums of one block of 16 rows with 64 columns, or two blocks with 32 columns, for tiles [from, to)
// along k. `sums` [rows][64] continue, or begin at zero.
template <int BLOCKS>
INLINE void add_products(const PackedRows& rows, int block, const char* w, int from, int to,
                         bool begins, float* sums) {
  constexpr int COLUMNS = 4 / BLOCKS;
  const auto sum = [&](int r, int v) { return sums + r * TILE_SIDE * PANEL + v * LANES; };
  constexpr int64_t STRIDE = PANEL * sizeof(float);
  if (begins) {
    zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
  } else {
    load_tile<SUMS>(sum(0, 0), STRIDE), load_tile<SUMS + 1>(sum(0, 1), STRIDE);
    load_tile<SUMS + 2>(BLOCKS == 2 ? sum(1, 0) : sum(0, 2), STRIDE);
    load_tile<SUMS + 3>(BLOCKS == 2 ? sum(1, 1) : sum(0, 3), STRIDE);
  }
  for (int at = from; at < to; at++) {
    const char* columns = w + (int64_t)at * TILE_SIDE * PANEL_STRIDE;
    load_tile<LEFT>(rows.tile(block, at), TILE_ROW_BYTES);
    load_tile<RIGHT>(columns, PANEL_STRIDE);
    dot_tiles_bf16<SUMS, LEFT, RIGHT>();
    load_tile<RIGHT + 1>(columns + 64, PANEL_STRIDE);
    dot_tiles_bf16<SUMS + 1, LEFT, RIGHT + 1>();
    if constexpr (BLOCKS == 2) {
      load_tile<LEFT + 1>(rows.tile(block + 1, at), TILE_ROW_BYTES);
      dot_tiles_bf16<SUMS + 2, LEFT + 1, RIGHT>();
      dot_tiles_bf16<SUMS + 3, LEFT + 1, RIGHT + 1>();
    } else {
      load_tile<RIGHT>(columns + 128, PANEL_STRIDE);
      dot_tiles_bf16<SUMS + 2, LEFT, RIGHT>();
      load_tile<RIGHT + 1>(columns + 192, PANEL_STRIDE);
      dot_tiles_bf16<SUMS + 3, LEFT, RIGHT + 1>();
    }
  }
  store_tile<SUMS>(sum(0, 0), STRIDE), store_tile<SUMS + 1>(sum(0, 1), STRIDE);
  store_tile<SUMS + 2>(COLUMNS == 2 ? sum(1, 0) : sum(0, 2), STRIDE);
  store_tile<SUMS + 3>(COLUMNS == 2 ? sum(1, 1) : sum(0, 3), STRIDE);
}

// Blocked along k, so that the panel's part stays in the first-level cache for all rows.
void multiply_bf16(const Weight& weight, const Writer& to, int panel, int first) {
  const PackedRows& rows = scratch.rows;
  const char* w = weight.data + panel * panel_bytes(BF16, weight.k);
  const int num_tiles = rows.num_tiles();
  const int step = rows.num_blocks() <= 2 ? num_tiles : BLOCK_DEPTH / TILE_ROW_BYTES;
  scratch.sums.resize((size_t)rows.num_blocks() * TILE_SIDE * PANEL);
  TileUse use(TILE_ROW_BYTES, TILE_ROW_BYTES);
  for (int from = 0; from < num_tiles; from += step) {
    const int until = std::min(from + step, num_tiles);
    for (int block = 0, count; block < rows.num_blocks(); block += count) {
      count = std::min(2, rows.num_blocks() - block);
      float* sums = scratch.sums.data() + (size_t)block * TILE_SIDE * PANEL;
      if (count == 1) {
        add_products<1>(rows, block, w, from, until, from == 0, sums);
      } else {
        add_products<2>(rows, block, w, from, until, from == 0, sums);
        add_products<2>(rows, block, w + 128, from, until, from == 0, sums + 2 * LANES);
      }
      if (until < num_tiles) continue;
      for (int b = block; b < block + count; b++, sums += TILE_SIDE * PANEL)
        write_block(to, panel, first + b * TILE_SIDE, rows.rows_of(b), sums);
    }
  }
}

// Two vectors of columns of a group, as tiles.
struct ColumnsQ8 {
  static constexpr int SIZE = 64, BYTES = 2 * PANEL + 64 * PANEL;

  void load(const char* group, int vector) {
    const char* data = group + 2 * PANEL + vector * 64;
    load_tile<RIGHT>(data, PANEL_STRIDE);
    load_tile<RIGHT + 1>(data + 64, PANEL_STRIDE);
  }
  static INLINE vf scaled(const char* group, int vector, vi dot, int32_t sum) {
    return to_float(dot - 128 * sum) * widen(remora::load<vuh>(group + vector * 32));
  }
};

struct ColumnsQ4 {
  static constexpr int SIZE = 32, BYTES = 4 * PANEL + 16 * PANEL;
  alignas(64) char bytes[2][SIZE / 4][TILE_ROW_BYTES];

  void load(const char* group, int vector) {
    for (int v = 0; v < 2; v++)
      for (int step = 0; step < SIZE / 8; step++) {
        const vi both = remora::load<vi>(group + 4 * PANEL + step * PANEL_STRIDE + (vector + v) * 64);
        store(bytes[v][2 * step], both & 0x0f0f0f0f);
        store(bytes[v][2 * step + 1], (both >> 4) & 0x0f0f0f0f);
      }
    load_tile<RIGHT>(bytes[0], TILE_ROW_BYTES);
    load_tile<RIGHT + 1>(bytes[1], TILE_ROW_BYTES);
  }
  static INLINE vf scaled(const char* group, int vector, vi dot, int32_t sum) {
    const char* scales = group + vector * 32;
    const vf scale = widen(remora::load<vuh>(scales)), least = widen(remora::load<vuh>(scales + 2 * PANEL));
    return fma(to_float(dot), scale, least * (float)sum);
  }
};

// One block of rows reads a panel once from beginning to end; more blocks keep a group's columns in
// registers, two vectors of columns at a time.
template <class Columns>
void multiply_grouped(const Weight& weight, const Rows& x, const Writer& to, int panel, int first) {
  const PackedRows& rows = scratch.rows;
  const char* w = weight.data + panel * panel_bytes(weight.format, weight.k);
  const int groups = x.stride / Columns::SIZE, num_blocks = rows.num_blocks();
  const int used = padded_k(weight.format, weight.k) / Columns::SIZE;
  const int width = num_blocks == 1 ? PANEL_VECTORS : 2;
  scratch.sums.assign((size_t)num_blocks * TILE_SIDE * PANEL, 0.0f);
  alignas(64) int32_t dots[2][TILE_SIDE][LANES];
  Columns columns;
  TileUse use(Columns::SIZE, Columns::SIZE);
  for (int begin = 0; begin < PANEL_VECTORS; begin += width)
    for (int at = 0; at < used; at++) {
      const char* group = w + at * (int64_t)Columns::BYTES;
      for (int vector = begin; vector < begin + width; vector += 2) {
        columns.load(group, vector);
        for (int block = 0; block < num_blocks; block++) {
          load_tile<LEFT>(rows.tile(block, at), Columns::SIZE);
          zero_tile<SUMS>(), zero_tile<SUMS + 1>();
          dot_tiles_s8u8<SUMS, LEFT, RIGHT>();
          dot_tiles_s8u8<SUMS + 1, LEFT, RIGHT + 1>();
          store_tile<SUMS>(dots[0], TILE_ROW_BYTES);
          store_tile<SUMS + 1>(dots[1], TILE_ROW_BYTES);
          for (int r = 0; r < rows.rows_of(block); r++) {
            const int row = block * TILE_SIDE + r;
            const int64_t quantised = (int64_t)(first + row) * groups + at;
            float* sums = scratch.sums.data() + row * PANEL + vector * LANES;
            UNROLL for (int v = 0; v < 2; v++) {
              const vf product = Columns::scaled(group, vector + v, load<vi>(dots[v][r]), x.sums[quantised]);
              store(sums + v * LANES, fma(product, splat(x.scales[quantised]), load<vf>(sums + v * LANES)));
            }
          }
        }
      }
    }
  for (int block = 0; block < num_blocks; block++)
    write_block(to, panel, first + block * TILE_SIDE, rows.rows_of(block),
                scratch.sums.data() + (size_t)block * TILE_SIDE * PANEL);
}

}  // namespace

void multiply_by_tiles(const Weight& weight, const Rows& x, const Writer& to, int panel, int first,
                       int last, uint64_t stage) {
  const bool is_bf16 = weight.format == BF16;
  const int depth = weight.format == Q4 ? TILE_ROW_BYTES / 2 : TILE_ROW_BYTES;
  const int size = is_bf16 ? weight.k : padded_k(weight.format, weight.k);
  scratch.rows.pack(x, is_bf16 ? 2 : 1, size, depth, first, last, stage);
  switch (weight.format) {
    case BF16: return multiply_bf16(weight, to, panel, first);
    case Q8: return multiply_grouped<ColumnsQ8>(weight, x, to, panel, first);
    default: return multiply_grouped<ColumnsQ4>(weight, x, to, panel, first);
  }
}

}  // namespace remora

#endif
