// Products of 16-bit and quantised weights by tile registers, for any number of rows.
//
// Sums are those of a tile product: of 32 k at a time in 16 bits (tile.h), whatever the number of
// rows. Quantised products have the same bits as without tiles: sums of a group are integers.
#pragma once

#include "product_writer.h"

namespace remora {

#if REMORA_TILES
// As `multiply_panel`, for formats of which `uses_tiles` is true.
void multiply_by_tiles(const Weight& weight, const Rows& x, const Writer& to,
                       const Columns& columns, int first, int last, uint64_t stage);
#endif

}  // namespace remora
