#include "linear.h"

#include <algorithm>
#include <atomic>

#include "dot.h"
#include "grouped_rows.h"
#include "product_writer.h"
#include "tile_product.h"

namespace remora {

namespace {

template <class Step, int MR, int NV>
void plain_tile(const Weight& weight, const Rows& x, const Writer& writer, int panel, int vector,
                int row) {
  const auto* rows = (const typename Step::element*)x.values + (int64_t)row * x.stride;
  const char* w = weight.data + panel * panel_bytes(weight.format, weight.k);
  const char* columns[NV];
  UNROLL for (int v = 0; v < NV; v++) columns[v] = w + (vector + v) * Step::BYTES;
  vf acc[MR][NV] = {};
  dot_columns<Step, MR, NV>(acc, rows, x.stride, columns, PANEL_VECTORS * Step::BYTES,
                            padded_k(weight.format, weight.k) / Step::K);
  writer.write_tile<MR, NV>(row, panel * PANEL + vector * LANES, acc);
}

// Every block is summed apart, then scaled and added.
template <class Codes, int MR, int NV>
void widened_tile(const Weight& weight, const Rows& x, const Writer& writer, int panel, int vector,
                  int row) {
  typedef StepWidened<Codes> Step;
  const bf16* rows = (const bf16*)x.values + (int64_t)row * x.stride;
  const char* w = weight.data + panel * panel_bytes(weight.format, weight.k);
  const int padded = padded_k(weight.format, weight.k);
  const Step step{Codes(w)};
  vf total[MR][NV] = {};
  for (int k = 0; k < padded; k += Codes::BLOCK) {
    const char* block = widened_block<Codes>(w, k);
    const char* columns[NV];
    UNROLL for (int v = 0; v < NV; v++)
      columns[v] = block + BLOCK_SCALES + (vector + v) * Step::BYTES;
    vf acc[MR][NV] = {};
    dot_columns<Step, MR, NV>(acc, rows + k, x.stride, columns, PANEL_VECTORS * Step::BYTES,
                              std::min(Codes::BLOCK, padded - k) / Step::K, step);
    UNROLL for (int v = 0; v < NV; v++) {
      const vf scale = load<vf>((const float*)block + (vector + v) * LANES);
      UNROLL for (int r = 0; r < MR; r++) total[r][v] = fma(acc[r][v], scale, total[r][v]);
    }
  }
  writer.write_tile<MR, NV>(row, panel * PANEL + vector * LANES, total);
}

// Rows of a register tile. Scales with levels take as many instructions as products, and are the same
// for all rows: half as wide, a tile of one register to a vector has room for twice the rows.
template <class Group>
constexpr int MOST_ROWS =
    Group::Scales::LEVEL_BYTES > 0 && (PARTS == 1 || HAS_BYTE_PAIRS) ? TILE_ROWS : GROUPED_ROWS;

template <class Group, int MR, int NV>
void grouped_tile(const Weight& weight, const Rows& x, const Writer& writer, int panel,
                  int vector, int row) {
  constexpr int WIDTH = PARTS == 1 && MR > GROUPED_ROWS ? std::min(NV, TILE_VECTORS / 2) : NV;
  const char* w = weight.data + panel * panel_bytes(weight.format, weight.k);
  const int groups = padded_k(weight.format, weight.k) / Group::SIZE;
  vf total[MR][NV];
  for (int v = 0; v < NV; v += WIDTH) {
    rf acc[MR][WIDTH * PARTS] = {};
    add_groups<Group>(w, groups, (vector + v) * PARTS, x, row, acc);
    to_vectors<MR, WIDTH>(acc, total, v);
  }
  writer.write_tile<MR, NV>(row, panel * PANEL + vector * LANES, total);
}

// Calls tile(number of vectors, vector) over columns of a panel. Parts of a panel can be narrower
// than a register tile.
template <class Tile>
INLINE void for_vectors(const Columns& columns, Tile&& tile) {
  const int width = columns.last - columns.first;
  if (width == 1) return tile(std::integral_constant<int, 1>{}, columns.first);
  if (width == 2) return tile(std::integral_constant<int, 2>{}, columns.first);
  for (int vector = columns.first; vector < columns.last; vector += TILE_VECTORS)
    tile(std::integral_constant<int, TILE_VECTORS>{}, vector);
}

// Calls tile(number of rows, number of vectors, vector, row) over rows and columns of a panel. Rows
// are divided evenly: 32 rows make tiles of 6, 6, 5, 5, 5, 5 rather than a last one of 2.
template <int MAX_ROWS, class Tile>
INLINE void for_tiles(int first, int last, const Columns& columns, Tile&& tile) {
  const int num_tiles = (last - first + MAX_ROWS - 1) / MAX_ROWS;
  for (int done = 0, row = first; done < num_tiles; done++) {
    const int rows = (last - row + num_tiles - done - 1) / (num_tiles - done);
    with_rows<MAX_ROWS>(rows, [&](auto count) {
      for_vectors(columns, [&](auto width, int vector) { tile(count, width, vector, row); });
    });
    row += rows;
  }
}

template <class Step>
void multiply_plain(const Weight& weight, const Rows& x, const Writer& to, const Columns& columns,
                    int first, int last) {
  for_tiles<TILE_ROWS>(first, last, columns, [&](auto rows, auto width, int vector, int row) {
    plain_tile<Step, decltype(rows)::value, decltype(width)::value>(weight, x, to, columns.panel,
                                                                    vector, row);
  });
}

template <class Codes>
void multiply_widened(const Weight& weight, const Rows& x, const Writer& to, const Columns& columns,
                      int first, int last) {
  for_tiles<TILE_ROWS>(first, last, columns, [&](auto rows, auto width, int vector, int row) {
    widened_tile<Codes, decltype(rows)::value, decltype(width)::value>(weight, x, to, columns.panel,
                                                                       vector, row);
  });
}

template <class Group>
void multiply_grouped(const Weight& weight, const Rows& x, const Writer& to,
                      const Columns& columns, int first, int last) {
  for_tiles<MOST_ROWS<Group>>(first, last, columns, [&](auto rows, auto width, int vector, int row) {
    grouped_tile<Group, decltype(rows)::value, decltype(width)::value>(weight, x, to, columns.panel,
                                                                       vector, row);
  });
}

}  // namespace

uint64_t new_stage() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void multiply_panel(const Weight& weight, const Rows& x, const Output& out, const Columns& columns,
                    int first, int last, const Updates* updates, uint64_t stage) {
  const Writer to{weight, out, updates};
  if (weight.format == F32) return multiply_plain<StepF32>(weight, x, to, columns, first, last);
  if (weight.format == F16) return multiply_plain<StepF16>(weight, x, to, columns, first, last);
#if REMORA_TILES
  multiply_by_tiles(weight, x, to, columns, first, last, stage);
#else
  if (weight.format == BF16) return multiply_plain<StepBF16>(weight, x, to, columns, first, last);
  if (is_widened(weight.format))
    return with_widened(weight.format, [&](auto codes) {
      multiply_widened<typename decltype(codes)::type>(weight, x, to, columns, first, last);
    });
  with_grouped(weight.format, [&](auto grouped) {
    multiply_grouped<decltype(grouped)>(weight, x, to, columns, first, last);
  });
#endif
}

}  // namespace remora
