// Paged attention: storing K and V, and attending to them.
//
// K and V of one page and head are adjacent, in groups of 16 tokens with the layout of a packed
// weight, so that both products of attention read them sequentially:
//   K  [page_size / 16][head_dim / W][16 tokens][W]
//   V  [page_size / 16][16 tokens / W][head_dim][W]
// where W is 2 for bf16 and 1 for float and f16, and head_dim is padded to 16. K and V may be stored in
// 8 bits (quantised_kv.h), in the same order; a tile's are widened before all heads attend to it. But
// tile registers and VNNI multiply int8 by queries and weights that are pairs of bytes, and W is 4.
//
// A query attends in tiles of 64 positions counted from the start of the sequence, with a running
// maximum and sum (Milakov and Gimelshein 2018; Dao et al. 2022). Every 256 positions, a partition,
// they begin anew and are joined with those of earlier partitions, so that threads can divide one
// sequence among them (Dao et al. 2023). With tile registers, or in bytes, a partition is one tile. Tiles and
// partitions do not depend on the division of work, so a row's result does not depend on other rows or
// on threads.
#pragma once

#include "batch.h"
#include "buffer.h"
#include "format.h"
#include "kv_format.h"
#include "tile.h"

namespace remora {

constexpr int GROUP_TOKENS = 16;  // tokens of a group
constexpr int TILE_TOKENS = 64;   // positions of a tile
constexpr int PARTITION_TOKENS = 256;
constexpr bool HAS_BYTE_PRODUCTS = HAS_TILES || HAS_BYTE_DOTS;  // K and V in bytes are not widened
constexpr int MAX_BLOCK_ROWS = HAS_TILES ? 64 : 48;

struct KvCache {
  char* data;  // [layers][pages][kv heads][K, V, scales if quantised]
  Format format;  // plain; of products
  KvFormat kv_format;  // as stored; PLAIN = in `format`
  bool is_windowed;  // windowed layers with page tables of their own
  int num_pages, page_size, num_kv_heads, head_dim;
  const bf16* static_scales;  // [layers][K, V][kv heads], of all tokens; null = each has its own

  const int64_t* slots(const Batch& batch) const {
    return is_windowed ? batch.window_slots : batch.slots;
  }
  const int32_t* table(const Batch& batch, int sequence) const {
    return (is_windowed ? batch.window_tables : batch.tables) +
           batch.table_rows[sequence] * batch.table_stride;
  }
  int padded_dim() const { return (head_dim + LANES - 1) / LANES * LANES; }
  bool is_quantised() const { return kv_format != PLAIN; }
  bool is_in_bytes() const { return HAS_BYTE_PRODUCTS && format == BF16 && kv_format == INT8; }
  // Consecutive numbers of a head's K, and tokens of V, that are adjacent: W above.
  int width() const { return is_in_bytes() ? 4 : format == BF16 ? 2 : 1; }
  int64_t half_bytes() const {
    return (int64_t)page_size * padded_dim() * (is_quantised() ? 1 : number_bytes(format));
  }
  int64_t head_bytes() const {
    return 2 * (half_bytes() + (is_quantised() ? page_size * (int64_t)sizeof(bf16) : 0));
  }
  int64_t page_bytes() const { return num_kv_heads * head_bytes(); }
  char* keys(int layer, int64_t page, int head) const {
    return data + ((int64_t)layer * num_pages + page) * page_bytes() + head * head_bytes();
  }
};

struct Attention {
  KvCache cache;
  int layer, num_heads;
  int window;    // positions that a query sees, including its own; 0 = all
  bool is_chunked;   // a query sees the positions since the last multiple of window instead
  float scale;   // of q.k
  float soft_cap;    // c of scores c * tanh(s / c); 0 = no cap
  const float* sinks;   // [num_heads] scores of keys without values, or null
  const float* slopes;  // [num_heads] score decrease per position of distance, or null
  const float* qkv;  // [T][qkv_stride]: heads of q, k, v, rotated
  int qkv_stride;
  void* out;  // [T][out_stride], bf16 or float
  int out_stride;
  bool out_is_bf16;

  // The first position that a query at this one sees.
  int64_t first_seen(int64_t position) const {
    if (window == 0) return 0;
    if (is_chunked) return position / window * window;
    return position < window ? 0 : position - window + 1;
  }
  int heads_per_kv() const { return num_heads / cache.num_kv_heads; }
  // Tokens of one sequence that are computed together.
  int block_tokens() const {
    const int tokens = MAX_BLOCK_ROWS / heads_per_kv();
    return tokens > 0 ? tokens : 1;
  }
};

class KvGroups;

// Buffers of one thread.
struct AttentionScratch {
  Buffer<float> out, sums, maxima;  // of the present partition
  Buffer<float> total_out, total_sums, total_maxima;
  Buffer<float> scores;  // of two blocks of tile rows, then the weights
  Buffer<char> queries;
  Buffer<float> query_scales;  // of queries in bytes
  Buffer<int32_t> products;    // of weights in bytes with V
  Buffer<char> values;         // V in bytes, of groups one after the other
  KvGroups* groups = nullptr;  // of quantised caches
  void reserve(const Attention& attention);
};

// Write a token's K and V to its slot, with non-finite values replaced: attention multiplies masked
// positions by 0.
void store_kv(const KvCache& cache, int layer, const float* key, const float* value, int64_t slot);

// Queries that are computed together: tokens [first, last) of a sequence, with the heads of one KV head.
struct Queries {
  int sequence, first, last, kv_head;
};

// One partition that some queries see.
struct Partition {
  Queries queries;
  int64_t number;
};

// First and last partition that tokens [first, last] see.
struct Partitions {
  int64_t first, last;
};
inline Partitions partitions_of(const Attention& attention, const Batch& batch, int first, int last) {
  return {attention.first_seen(batch.positions[first]) / PARTITION_TOKENS,
          batch.positions[last] / PARTITION_TOKENS};
}

// Floats of the sums of one partition for so many tokens and the heads of one KV head.
inline int64_t partition_size(const Attention& attention, int num_tokens) {
  return (int64_t)num_tokens * attention.heads_per_kv() *
         (attention.cache.padded_dim() + LANES + 1);
}

void attend(const Attention& attention, const Batch& batch, const Queries& queries,
            AttentionScratch& scratch);

// The same in parts: sums of one partition, then the results of all of them, in their order. `parts`
// has `partition_size` floats for each. `next`: what this thread attends to next, if anything; a guess
// that changes speed only.
void attend_partition(const Attention& attention, const Batch& batch, const Partition& partition,
                      const Partition* next, float* part, AttentionScratch& scratch);
void join_partitions(const Attention& attention, const Batch& batch, const Queries& queries,
                     float* parts, int count, AttentionScratch& scratch);

}  // namespace remora
