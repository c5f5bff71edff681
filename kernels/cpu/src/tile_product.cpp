#include "tile_product.h"

#if REMORA_TILES

#include <algorithm>

#include "buffer.h"
#include "division.h"
#include "dot.h"
#include "grouped_rows.h"
#include "tile_low_rank.h"
#include "tile_widened.h"

namespace remora {

namespace {

// Rows of a chunk in the order in which tiles read them. A block has 16 rows, two blocks make a pair,
// and the tiles of a pair alternate. Rows past the last one are undefined; they change no others.
class PackedRows {
 public:
  void pack(const Rows& x, Format format, int k, int first, int last, uint64_t stage) {
    if (stage == stage_ && x.values == values_ && first == first_ && last == last_) return;
    stage_ = stage, values_ = x.values, first_ = first, last_ = last;
    depth_ = is_grouped(format) ? group_size(format) : TILE_ROW_BYTES;
    const int item = format == BF16 ? 2 : 1, row_bytes = k * item;
    num_tiles_ = ceil_div(row_bytes, depth_);
    data_.reserve((size_t)num_blocks() * num_tiles_ * tile_bytes());
    const int64_t stride = (int64_t)x.stride * item;
    switch (depth_) {
      case 64: copy<64>((const char*)x.values, stride, row_bytes); break;
      case 32: copy<32>((const char*)x.values, stride, row_bytes); break;
      default: copy<16>((const char*)x.values, stride, row_bytes);
    }
    if (format != BF16) copy_scales(x, x.stride / group_size(format));
  }

  int num_rows() const { return last_ - first_; }
  int num_blocks() const { return ceil_div(num_rows(), TILE_SIDE); }
  int num_tiles() const { return num_tiles_; }
  int rows_of(int block) const { return std::min(TILE_SIDE, num_rows() - block * TILE_SIDE); }
  // Bytes between a block's tiles: those of the pair's other block lie between them.
  int tile_step(int block) const {
    return (block % 2 || block + 1 < num_blocks() ? 2 : 1) * tile_bytes();
  }
  const char* tiles(int block) const {
    return data_.data() + ((int64_t)(block - block % 2) * num_tiles_ + block % 2) * tile_bytes();
  }
  // Of quantised rows, for one group: scales and sums of the rows of a block.
  const float* scales(int block, int group) const {
    return scales_.data() + ((int64_t)block * num_tiles_ + group) * 2 * TILE_SIDE;
  }

 private:
  int tile_bytes() const { return TILE_SIDE * depth_; }

  // DEPTH is a constant so that whole pieces are copied by vectors.
  template <int DEPTH>
  void copy(const char* values, int64_t stride, int row_bytes) {
    for (int row = 0; row < num_rows(); row++) {
      const int block = row / TILE_SIDE, step = tile_step(block);
      const char* from = values + (first_ + row) * stride;
      char* to = const_cast<char*>(tiles(block)) + row % TILE_SIDE * DEPTH;
      int at = 0;
      for (; at + DEPTH <= row_bytes; at += DEPTH, to += step) __builtin_memcpy(to, from + at, DEPTH);
      if (at == row_bytes) continue;
      memcpy(to, from + at, row_bytes - at);
      memset(to + row_bytes - at, 0, DEPTH - (row_bytes - at));
    }
  }

  void copy_scales(const Rows& x, int groups) {
    scales_.reserve((size_t)num_blocks() * num_tiles_ * 2 * TILE_SIDE);
    for (int row = 0; row < num_rows(); row++)
      for (int group = 0; group < num_tiles_; group++) {
        const int64_t from = (int64_t)(first_ + row) * groups + group;
        float* to = const_cast<float*>(scales(row / TILE_SIDE, group)) + row % TILE_SIDE;
        to[0] = x.scales[from], to[TILE_SIDE] = (float)x.sums[from];
      }
  }

  uint64_t stage_ = 0;
  const void* values_ = nullptr;
  int first_ = 0, last_ = 0, num_tiles_ = 0, depth_ = 0;
  Buffer<char> data_;
  Buffer<float> scales_;
};

// Buffers of one thread.
struct Scratch {
  PackedRows rows;
  Buffer<float> sums;  // [rows, whole blocks][64]
};
thread_local Scratch scratch;

constexpr int BLOCK_SUMS = TILE_SIDE * PANEL;

// Stores the sums [rows][64] of one block of rows, a register tile at a time or a narrower one.
template <int NV>
void write_vectors(const Writer& to, const Columns& columns, int row, int num_rows,
                   const float* sums) {
  for (int done = 0; done < num_rows; done += TILE_ROWS)
    with_rows<TILE_ROWS>(std::min(TILE_ROWS, num_rows - done), [&](auto count) {
      constexpr int MR = decltype(count)::value;
      for (int vector = columns.first; vector < columns.last; vector += NV) {
        vf acc[MR][NV];
        UNROLL for (int r = 0; r < MR; r++)
          UNROLL for (int v = 0; v < NV; v++)
            acc[r][v] = load<vf>(sums + (done + r) * PANEL + (vector + v) * LANES);
        to.write_tile<MR, NV>(row + done, columns.panel * PANEL + vector * LANES, acc);
      }
    });
}

// The last part of a product of some columns.
struct Finish {
  Writer to;               // with updates that tiles do not compute
  const Updates* updates;  // that tiles compute, or null
  const Columns& columns;
  uint64_t stage;

  Finish(const Writer& writer, const Columns& columns, uint64_t stage)
      : to(writer), updates(nullptr), columns(columns), stage(stage) {
    if (to.updates && to.updates->low.format == BF16) std::swap(updates, to.updates);
  }

  // With tile registers as a product of bf16 has them.
  void update(int row, int num_rows, float* sums) const {
    if (updates) expand_by_tiles(*updates, columns, row, num_rows, stage, sums);
  }

  void write(int row, int num_rows, const float* sums) const {
    if (columns.last - columns.first < TILE_VECTORS)
      write_vectors<2>(to, columns, row, num_rows, sums);
    else
      write_vectors<TILE_VECTORS>(to, columns, row, num_rows, sums);
  }
};

// Tiles of k that are multiplied at a time. One pair of blocks reads its columns once and takes all of
// k. More of them read the columns again, from the first-level cache, which a part fills; few blocks
// take a small part, so that reading the next one ahead is spread over more of the time. Sums continue
// exactly from part to part: the result is the same.
inline int depth_of_part(int num_tiles, int num_blocks) {
  return num_blocks <= 2 ? num_tiles : num_blocks <= 4 ? 6 : 10;
}

// Reads columns ahead of their use into the second-level cache, some lines at a time.
struct Prefetch {
  const char* at;
  int lines;  // of each step

  INLINE void step() {
    for (int line = 0; line < lines; line++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Bytes between columns that are read once and the prefetch into the first-level cache.
constexpr int STREAM_AHEAD = 4096;

template <int BYTES>
INLINE void prefetch_stream(const char* columns) {
  UNROLL for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(columns + STREAM_AHEAD + at);
}

// Sums of BLOCKS blocks of rows with 32 columns, whose tiles follow each other in `w`, for `count`
// tiles along k. `sums` [rows][64] continue, or begin at zero.
template <int BLOCKS>
INLINE void add_products(const char* x, int x_step, const char* w, int count, bool begins,
                         float* sums, Prefetch& ahead) {
  constexpr int64_t STRIDE = PANEL * sizeof(float);
  float* below = sums + TILE_SIDE * PANEL;
  if (begins) {
    zero_tile<SUMS>(), zero_tile<SUMS + 1>();
    if constexpr (BLOCKS == 2) zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
  } else {
    load_tile<SUMS>(sums, STRIDE), load_tile<SUMS + 1>(sums + LANES, STRIDE);
    if constexpr (BLOCKS == 2)
      load_tile<SUMS + 2>(below, STRIDE), load_tile<SUMS + 3>(below + LANES, STRIDE);
  }
  for (int at = 0; at < count; at++, x += x_step, w += 2 * TILE_BYTES) {
    dot_blocks<BLOCKS>(x, w);
    ahead.step();
  }
  store_tile<SUMS>(sums, STRIDE), store_tile<SUMS + 1>(sums + LANES, STRIDE);
  if constexpr (BLOCKS == 2)
    store_tile<SUMS + 2>(below, STRIDE), store_tile<SUMS + 3>(below + LANES, STRIDE);
}

// Sums of one block of rows with both halves of a panel's columns. Two streams are read faster than
// one.
INLINE void multiply_block(const char* x, int x_step, const char* w, int num_tiles, float* sums) {
  constexpr int64_t STRIDE = PANEL * sizeof(float);
  const char* second = w + (int64_t)num_tiles * 2 * TILE_BYTES;
  zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
  for (int at = 0; at < num_tiles; at++, w += 2 * TILE_BYTES, second += 2 * TILE_BYTES) {
    prefetch_stream<2 * TILE_BYTES>(w), prefetch_stream<2 * TILE_BYTES>(second);
    load_tile<LEFT>(x + at * (int64_t)x_step, TILE_ROW_BYTES);
    load_tile<RIGHT>(w, TILE_ROW_BYTES);
    dot_tiles_bf16<SUMS, LEFT, RIGHT>();
    load_tile<RIGHT + 1>(w + TILE_BYTES, TILE_ROW_BYTES);
    dot_tiles_bf16<SUMS + 1, LEFT, RIGHT + 1>();
    load_tile<RIGHT>(second, TILE_ROW_BYTES);
    dot_tiles_bf16<SUMS + 2, LEFT, RIGHT>();
    load_tile<RIGHT + 1>(second + TILE_BYTES, TILE_ROW_BYTES);
    dot_tiles_bf16<SUMS + 3, LEFT, RIGHT + 1>();
  }
  store_tile<SUMS>(sums, STRIDE), store_tile<SUMS + 1>(sums + LANES, STRIDE);
  store_tile<SUMS + 2>(sums + 2 * LANES, STRIDE), store_tile<SUMS + 3>(sums + 3 * LANES, STRIDE);
}

// Columns are multiplied in parts of a few tiles along k, each with all rows while it stays in the
// first-level cache; the next part is read ahead.
void multiply_bf16(const Weight& weight, const Finish& finish, int first) {
  const Columns& columns = finish.columns;
  const PackedRows& rows = scratch.rows;
  const char* w = weight.data + columns.panel * panel_bytes(BF16, weight.k);
  const int num_tiles = rows.num_tiles(), num_blocks = rows.num_blocks();
  float* all_sums = scratch.sums.reserve((size_t)num_blocks * BLOCK_SUMS);
  TileUse use(TilePalette(TILE_ROW_BYTES, std::min(TILE_SIDE, rows.num_rows())));
  if (num_blocks == 1 && columns.last - columns.first == PANEL_VECTORS) {
    multiply_block(rows.tiles(0), rows.tile_step(0), w, num_tiles, all_sums);
    finish.update(first, rows.num_rows(), all_sums);
    return finish.write(first, rows.num_rows(), all_sums);
  }
  const int parts = ceil_div(num_tiles, depth_of_part(num_tiles, num_blocks));
  const int lines = 2 * TILE_BYTES / 64;
  const int last_part = columns.last / 2 * parts - 1;
  for (int part = columns.first / 2 * parts; part <= last_part; part++) {
    const int half = part / parts, from = part_start(num_tiles, part % parts, parts);
    const int count = part_start(num_tiles, part % parts + 1, parts) - from;
    const char* tiles = w + ((int64_t)half * num_tiles + from) * 2 * TILE_BYTES;
    Prefetch ahead{tiles + count * 2 * TILE_BYTES, ceil_div(lines, ceil_div(num_blocks, 2))};
    for (int block = 0; block < num_blocks; block += 2) {
      float* sums = all_sums + (size_t)block * BLOCK_SUMS;
      const int x_step = rows.tile_step(block);
      const char* x = rows.tiles(block) + from * (int64_t)x_step;
      if (block + 1 < num_blocks)
        add_products<2>(x, x_step, tiles, count, from == 0, sums + half * 2 * LANES, ahead);
      else
        add_products<1>(x, x_step, tiles, count, from == 0, sums + half * 2 * LANES, ahead);
      for (int b = block; part == last_part && b < std::min(block + 2, num_blocks); b++) {
        const int row = first + b * TILE_SIDE;
        finish.update(row, rows.rows_of(b), all_sums + b * BLOCK_SUMS);
        finish.write(row, rows.rows_of(b), all_sums + b * BLOCK_SUMS);
      }
    }
  }
}

// Sums of BLOCKS blocks of rows with four or two vectors of columns: four tiles. The sums of one group
// are added while tiles multiply the next one.
template <class Group, int BLOCKS>
class GroupedProduct {
 public:
  static constexpr int VECTORS = 4 / BLOCKS;

  GroupedProduct(const char* panel, const PackedRows& rows, int block, int vector, float* sums)
      : panel_(panel), rows_(rows), block_(block), vector_(vector), sums_(sums) {}

  // `sums` [16 rows of each block][64] += products of all groups.
  void run(Prefetch& ahead) {
    const int num_groups = rows_.num_tiles(), x_step = rows_.tile_step(block_);
    const char* x = rows_.tiles(block_);
    take(0);
    load_operands(x, 0);
    for (int group = 0; group < num_groups; group++) {
      zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
      dot_tiles_s8<SUMS, LEFT, RIGHT>();
      dot_tiles_s8<SUMS + 1, LEFT, RIGHT + 1>();
      if constexpr (BLOCKS == 2) {
        dot_tiles_s8<SUMS + 2, LEFT + 1, RIGHT>();
        dot_tiles_s8<SUMS + 3, LEFT + 1, RIGHT + 1>();
      } else {
        const auto& columns = columns_[group % 2];
        load_tile<RIGHT>(columns[2].data(), TILE_ROW_BYTES);
        dot_tiles_s8<SUMS + 2, LEFT, RIGHT>();
        load_tile<RIGHT + 1>(columns[3].data(), TILE_ROW_BYTES);
        dot_tiles_s8<SUMS + 3, LEFT, RIGHT + 1>();
      }
      x += x_step;
      if (group + 1 < num_groups) take(group + 1), load_operands(x, group + 1);
      replace<0>(group), replace<1>(group), replace<2>(group), replace<3>(group);
      ahead.step();
    }
    add(num_groups - 1, 0), add(num_groups - 1, 1), add(num_groups - 1, 2), add(num_groups - 1, 3);
  }

 private:
  INLINE void take(int group) {
    constexpr int OF_VECTOR = Group::GROUP_BYTES / PANEL_VECTORS;
    const char* codes = Group::codes_of(panel_, group) + vector_ * OF_VECTOR;
    UNROLL for (int v = 0; v < VECTORS; v++) columns_[group % 2][v].take(codes + v * OF_VECTOR);
  }

  INLINE void load_operands(const char* x, int group) {
    const auto& columns = columns_[group % 2];
    load_tile<LEFT>(x, Group::SIZE);
    if constexpr (BLOCKS == 2) load_tile<LEFT + 1>(x + TILE_SIDE * Group::SIZE, Group::SIZE);
    load_tile<RIGHT>(columns[0].data(), TILE_ROW_BYTES);
    load_tile<RIGHT + 1>(columns[1].data(), TILE_ROW_BYTES);
  }

  template <int TILE>
  INLINE void replace(int group) {
    if (group > 0) add(group - 1, TILE);
    store_tile<SUMS + TILE>(dots_[TILE], TILE_ROW_BYTES);
  }

  INLINE void add(int group, int tile) {
    const int block = tile / VECTORS, column = (vector_ + tile % VECTORS) * LANES;
    const auto of_columns = Group::template scales_of<vf>(panel_, group, column);
    const float* scales = rows_.scales(block_ + block, group);
    float* sums = sums_ + block * TILE_SIDE * PANEL + column;
    UNROLL for (int r = 0; r < TILE_SIDE; r++, sums += PANEL) {
      const vf dot = to_float(load<vi>(dots_[tile][r]));
      const vf product = of_columns.scaled(dot, scales[TILE_SIDE + r]);
      store(sums, fma(product, splat(scales[r]), load<vf>(sums)));
    }
  }

  const char* panel_;
  const PackedRows& rows_;
  const int block_, vector_;
  float* sums_;
  typename Group::Tile columns_[2][VECTORS];
  alignas(64) int32_t dots_[4][TILE_SIDE][LANES] = {};
};

// A tile takes as long for one row as for sixteen, and needs codes unpacked in memory: vectors are
// faster for up to so many rows.
constexpr int FEW_ROWS = 4;

template <class Group>
void add_few_rows(const char* w, const Rows& x, int first, float* sums) {
  constexpr int N = PANEL_VECTORS * PARTS;
  const PackedRows& rows = scratch.rows;
  with_rows<FEW_ROWS>(rows.num_rows(), [&](auto count) {
    constexpr int MR = decltype(count)::value;
    rf total[MR][N] = {};
    add_groups<Group>(w, rows.num_tiles(), 0, x, first, total);
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int v = 0; v < N; v++)
        store(sums + r * PANEL + v * REGISTER_LANES, total[r][v]);
  });
}

template <class Group>
void add_by_tiles(const char* w, float* sums) {
  const PackedRows& rows = scratch.rows;
  const int num_rows = rows.num_rows(), num_blocks = rows.num_blocks();
  TileUse use(TilePalette(Group::SIZE, std::min(TILE_SIDE, num_rows)));
  // Meanwhile the next panel is read into the second-level cache.
  Prefetch ahead{Group::block_of(w, rows.num_tiles()),
                 ceil_div(Group::BYTES / Group::GROUPS / 64, num_blocks)};
  for (int vector = 0; vector < PANEL_VECTORS; vector += 2)
    for (int block = 0; block + 1 < num_blocks; block += 2)
      GroupedProduct<Group, 2>(w, rows, block, vector, sums + block * BLOCK_SUMS).run(ahead);
  if (const int block = num_blocks - 1; block % 2 == 0) {
    float* last = sums + block * BLOCK_SUMS;
    GroupedProduct<Group, 1>(w, rows, block, 0, last).run(ahead);
  }
}

template <class Codes>
void add_widened(const char* w, int padded_k, float* sums) {
  const PackedRows& rows = scratch.rows;
  TileUse use(TilePalette(TILE_ROW_BYTES, std::min(TILE_SIDE, rows.num_rows())));
  WidenedProduct<Codes, PackedRows>(w, padded_k, rows).run(sums);
}

// Products of whole panels. add(panel, sums): sums [rows, whole blocks][64] += the product
template <class Add>
void multiply_whole(const Weight& weight, const Finish& finish, int first, Add&& add) {
  const PackedRows& rows = scratch.rows;
  const int num_blocks = rows.num_blocks();
  float* sums = scratch.sums.reserve((size_t)num_blocks * BLOCK_SUMS);
  std::fill_n(sums, num_blocks * BLOCK_SUMS, 0.0f);
  add(weight.data + finish.columns.panel * panel_bytes(weight.format, weight.k), sums);
  const auto for_blocks = [&](auto&& call) {
    for (int block = 0; block < num_blocks; block++)
      call(first + block * TILE_SIDE, rows.rows_of(block), sums + block * BLOCK_SUMS);
  };
  if (finish.updates) {
    TileUse use(TilePalette(TILE_ROW_BYTES, std::min(TILE_SIDE, rows.num_rows())));
    for_blocks([&](int row, int count, float* at) { finish.update(row, count, at); });
  }
  for_blocks([&](int row, int count, float* at) { finish.write(row, count, at); });
}

}  // namespace

void multiply_by_tiles(const Weight& weight, const Rows& x, const Writer& to,
                       const Columns& columns, int first, int last, uint64_t stage) {
  const Format format = format_of_rows(weight.format);
  const int padded = padded_k(weight.format, weight.k);
  scratch.rows.pack(x, format, format == BF16 ? weight.k : padded, first, last, stage);
  const Finish finish(to, columns, stage);
  if (finish.updates) arrange_shrunk(*finish.updates, first, last, stage);
  if (weight.format == BF16) return multiply_bf16(weight, finish, first);
  if (is_widened(weight.format))
    return with_widened(weight.format, [&](auto codes) {
      multiply_whole(weight, finish, first, [&](const char* w, float* sums) {
        add_widened<typename decltype(codes)::type>(w, padded, sums);
      });
    });
  with_grouped(weight.format, [&](auto grouped) {
    multiply_whole(weight, finish, first, [&](const char* w, float* sums) {
      if (last - first <= FEW_ROWS)
        add_few_rows<decltype(grouped)>(w, x, first, sums);
      else
        add_by_tiles<decltype(grouped)>(w, sums);
    });
  });
}

}  // namespace remora

#endif
