#include "attention.h"

#include <algorithm>
#include <optional>

#include "activation.h"
#include "dot.h"
#include "tile.h"

namespace remora {

namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // finite: lowest minus lowest is 0

// Replaces NaN and infinities, which would survive a multiplication by 0.
INLINE vf finite(vf x) {
  const vf most = splat(3.38e38f);
  return min(most, max(-most, x == x ? x : vf{}));
}

// Elements of a query: whole tiles.
constexpr int padded_query(int dim) { return HAS_TILES ? (dim + 31) / 32 * 32 : dim; }

// Calls body(first element, number of elements) for vectors of a head; the last may be shorter.
template <class Body>
INLINE void for_vectors(int size, Body&& body) {
  int at = 0;
  for (; at + LANES <= size; at += LANES) body(at, LANES);
  if (at < size) body(at, size - at);
}

INLINE vf load_some(const float* from, int count) {
  if (count == LANES) return load<vf>(from);
  float values[LANES] = {};
  std::copy_n(from, count, values);
  return load<vf>(values);
}

template <class T>
INLINE void store_some(T* to, vf x, int count) {
  T values[LANES];
  if constexpr (sizeof(T) == 2)
    store(values, narrow(x));
  else
    store(values, x);
  if (count == LANES)
    memcpy(to, values, sizeof(values));
  else
    std::copy_n(values, count, to);
}

template <class Step>
void store_rows(const KvCache& cache, char* keys, const float* key, const float* value, int offset) {
  typedef typename Step::element T;
  const int dim = cache.padded_dim(), group = offset / GROUP_TOKENS, lane = offset % GROUP_TOKENS;
  T* k = (T*)keys + (int64_t)group * GROUP_TOKENS * dim;
  T* v = (T*)(keys + cache.half_bytes()) + (int64_t)group * GROUP_TOKENS * dim;
  k += lane * Step::K;
  v += lane / Step::K * dim * Step::K + lane % Step::K;
  for_vectors(cache.head_dim, [&](int first, int count) {
    T keys_of[LANES], values_of[LANES];
    store_some(keys_of, finite(load_some(key + first, count)), LANES);
    store_some(values_of, finite(load_some(value + first, count)), LANES);
    for (int i = 0; i < count; i++) {
      const int d = first + i;
      k[d / Step::K * GROUP_TOKENS * Step::K + d % Step::K] = keys_of[i];
      v[d * Step::K] = values_of[i];
    }
  });
}

// The rows of one block: queries of consecutive tokens, each with the heads that share K and V.
template <class Step>
class Block {
  typedef typename Step::element T;
  static constexpr int VECTORS = TILE_TOKENS / LANES;
  static constexpr bool BY_TILES = HAS_TILES && std::is_same_v<Step, StepBF16>;
  static constexpr int DEPTH = 32;  // values along k of a tile
  static constexpr int32_t IOTA[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

 public:
  Block(const Attention& attention, const Batch& batch, const Queries& queries,
        AttentionScratch& scratch)
      : a_(attention),
        cache_(attention.cache),
        batch_(batch),
        scratch_(scratch),
        table_(attention.cache.table(batch, queries.sequence)),
        first_(queries.first),
        heads_(attention.heads_per_kv()),
        rows_((queries.last - queries.first) * heads_),
        dim_(attention.cache.padded_dim()),
        query_dim_(padded_query(dim_)),
        kv_head_(queries.kv_head) {}

  // Attend to all partitions, one after the other.
  void run() {
    take_queries();
    begin();
    const Partitions seen = partitions_of(a_, batch_, first_, last_token());
    for (int64_t at = seen.first; at <= seen.last; at++) {
      attend_partition(at);
      join({scratch_.out.data(), scratch_.sums.data(), scratch_.maxima.data()});
    }
    give_back();
  }

  // Attend to one partition and keep its sums in `part`.
  void run_partition(int64_t partition, float* part) {
    take_queries();
    attend_partition(partition);
    const Sums to = sums_in(part);
    std::copy_n(scratch_.out.data(), rows_ * dim_, to.out);
    std::copy_n(scratch_.sums.data(), rows_ * LANES, to.sums);
    std::copy_n(scratch_.maxima.data(), rows_, to.maxima);
  }

  // Join the sums of `count` partitions, in their order.
  void finish(float* parts, int count) {
    begin();
    for (int at = 0; at < count; at++)
      join(sums_in(parts + at * partition_size(a_, last_token() - first_ + 1)));
    give_back();
  }

 private:
  // Of each row: products with V, weights by lane, and the greatest score.
  struct Sums {
    float *out, *sums, *maxima;
  };
  Sums sums_in(float* part) const {
    return {part, part + rows_ * dim_, part + rows_ * (dim_ + LANES)};
  }
  int last_token() const { return first_ + (rows_ - 1) / heads_; }
  int64_t position(int row) const { return batch_.positions[first_ + row / heads_]; }

  // A sink counts like a first key with a value of zero.
  void begin() {
    std::fill_n(scratch_.total_out.begin(), rows_ * dim_, 0.0f);
    std::fill_n(scratch_.total_sums.begin(), rows_ * LANES, 0.0f);
    std::fill_n(scratch_.total_maxima.begin(), rows_, LOWEST);
    for (int row = 0; a_.sinks && row < rows_; row++) {
      const float score = a_.sinks[kv_head_ * heads_ + row % heads_] * LOG2_E;
      scratch_.total_maxima[row] = std::max(score, LOWEST);
      scratch_.total_sums[row * LANES] = 1.0f;
    }
  }

  // Compiled once, so that partitions of one thread and of several are joined by the same code. A
  // partition that a row does not see changes nothing.
  __attribute__((noinline)) void join(Sums part) {
    for (int row = 0; row < rows_; row++) {
      float& most = scratch_.total_maxima[row];
      const float now = std::max(most, part.maxima[row]);
      const vf before = exp2(splat(most - now)), added = exp2(splat(part.maxima[row] - now));
      most = now;
      const auto add = [&](float* total, const float* more) {
        store(total, fma(load<vf>(more), added, load<vf>(total) * before));
      };
      add(&scratch_.total_sums[row * LANES], part.sums + row * LANES);
      for (int d = 0; d < dim_; d += LANES)
        add(&scratch_.total_out[row * dim_ + d], part.out + row * dim_ + d);
    }
  }

  void attend_partition(int64_t partition) {
#if REMORA_TILES
    std::optional<TileUse> use;
    if (BY_TILES) use.emplace(TILE_ROW_BYTES, TILE_ROW_BYTES / 2);
#endif
    std::fill_n(scratch_.out.begin(), rows_ * dim_, 0.0f);
    std::fill_n(scratch_.sums.begin(), rows_ * LANES, 0.0f);
    std::fill_n(scratch_.maxima.begin(), rows_, LOWEST);
    const int64_t from = batch_.positions[first_], to = batch_.positions[last_token()];
    constexpr int TILES = PARTITION_TOKENS / TILE_TOKENS;
    const int64_t begin = std::max(a_.first_seen(from) / TILE_TOKENS, partition * TILES);
    const int64_t end = std::min(to / TILE_TOKENS, partition * TILES + TILES - 1);
    for (int64_t tile = begin; tile <= end; tile++) {
      locate(tile, to);
#if REMORA_TILES
      if constexpr (BY_TILES) {
        attend_by_tiles(tile * TILE_TOKENS);
        continue;
      }
#endif
      // A few rows at a time are computed completely while K and V of the tile stay in the L1 cache.
      for (int row = 0; row < rows_; row += TILE_ROWS)
        with_rows<TILE_ROWS>(std::min(rows_ - row, TILE_ROWS), [&](auto count) {
          attend_tile<decltype(count)::value>(tile * TILE_TOKENS, row);
        });
    }
  }

  void take_queries() {
    T* queries = (T*)scratch_.queries.data();
    const float factor = a_.scale * LOG2_E;
    for (int row = 0; row < rows_; row++) {
      const float* from = a_.qkv + (int64_t)(first_ + row / heads_) * a_.qkv_stride +
                          (kv_head_ * heads_ + row % heads_) * cache_.head_dim;
      T* to = queries + row * query_dim_;
      for_vectors(cache_.head_dim, [&](int d, int count) {
        store_some(to + d, load_some(from + d, count) * factor, count);
      });
      std::fill(to + cache_.head_dim, to + query_dim_, T{});
    }
  }

  // Find the groups of 16 positions of a tile; those past `last` repeat the first one.
  void locate(int64_t tile, int64_t last) {
    for (int group = 0; group < TILE_TOKENS / GROUP_TOKENS; group++) {
      int64_t at = tile * TILE_TOKENS + group * GROUP_TOKENS;
      if (at > last) {
        keys_[group] = keys_[0];
        continue;
      }
      num_groups_ = group + 1;
      const int64_t page = table_[at / cache_.page_size], offset = at % cache_.page_size;
      keys_[group] = cache_.keys(a_.layer, page, kv_head_) + offset * dim_ * sizeof(T);
    }
  }

  template <int MR>
  void attend_tile(int64_t start, int row) {
    const T* queries = (const T*)scratch_.queries.data() + row * query_dim_;
    vf scores[MR][VECTORS];
    for (int vector = 0; vector < VECTORS; vector += TILE_VECTORS) {
      vf acc[MR][TILE_VECTORS] = {};
      dot_columns<Step, MR, TILE_VECTORS>(acc, queries, query_dim_, keys_ + vector, 64, dim_ / Step::K);
      UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++) scores[r][vector + v] = acc[r][v];
    }
    T weights[MR * TILE_TOKENS];
    float shrink[MR];
    UNROLL for (int r = 0; r < MR; r++)
      shrink[r] = weigh(start, row + r, scores[r], weights + r * TILE_TOKENS);
    const int vectors = dim_ / LANES;
    int v = 0;
    for (; v + TILE_VECTORS <= vectors; v += TILE_VECTORS)
      add_values<MR, TILE_VECTORS>(row, v, weights, shrink);
    for (; v < vectors; v++) add_values<MR, 1>(row, v, weights, shrink);
  }

#if REMORA_TILES
  // As `attend_tile`, for all rows, by tile registers.
  void attend_by_tiles(int64_t start) {
    for (int row = 0; row < rows_; row += TILE_SIDE) {
      const int count = std::min(rows_ - row, TILE_SIDE);
      float scores[TILE_SIDE][TILE_TOKENS];
      score_by_tiles(row, scores);
      alignas(64) T weights[TILE_SIDE][TILE_TOKENS];  // rows past the last one are not used
      for (int r = 0; r < count; r++) {
        vf s[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) s[v] = load<vf>(scores[r] + v * LANES);
        const float shrink = weigh(start, row + r, s, weights[r]);
        if (shrink == 1.0f) continue;
        float* out = &scratch_.out[(row + r) * dim_];
        for (int d = 0; d < dim_; d += LANES) store(out + d, load<vf>(out + d) * shrink);
      }
      for (int vector = 0; vector < dim_ / LANES; vector++) add_values_by_tile(row, vector, weights);
    }
  }

  // The last tile along a head of uneven size meets queries of zeros, and keys of the next group or
  // values: finite numbers.
  void score_by_tiles(int row, float (&scores)[TILE_SIDE][TILE_TOKENS]) const {
    const T* queries = (const T*)scratch_.queries.data() + row * query_dim_;
    zero_tile<SUMS>(), zero_tile<SUMS + 1>(), zero_tile<SUMS + 2>(), zero_tile<SUMS + 3>();
    for (int d = 0; d < query_dim_; d += DEPTH) {
      load_tile<LEFT>(queries + d, query_dim_ * sizeof(T));
      const auto add = [&](auto group) {
        if (group >= num_groups_) return;
        load_tile<RIGHT>(keys_[group] + d * GROUP_TOKENS * sizeof(T), TILE_ROW_BYTES);
        dot_tiles_bf16<SUMS + group, LEFT, RIGHT>();
      };
      add(std::integral_constant<int, 0>{}), add(std::integral_constant<int, 1>{});
      add(std::integral_constant<int, 2>{}), add(std::integral_constant<int, 3>{});
    }
    constexpr int64_t STRIDE = TILE_TOKENS * sizeof(float);
    store_tile<SUMS>(scores[0], STRIDE), store_tile<SUMS + 1>(scores[0] + LANES, STRIDE);
    store_tile<SUMS + 2>(scores[0] + 2 * LANES, STRIDE);
    store_tile<SUMS + 3>(scores[0] + 3 * LANES, STRIDE);
  }

  // Two groups of tokens make a whole tile if they are neighbours in every page.
  void add_values_by_tile(int row, int vector, const T (&weights)[TILE_SIDE][TILE_TOKENS]) {
    constexpr int64_t WEIGHTS_STRIDE = TILE_TOKENS * sizeof(T);
    float* out = &scratch_.out[row * dim_ + vector * LANES];
    const bool in_pairs = cache_.page_size % DEPTH == 0;
    load_tile<SUMS>(out, dim_ * sizeof(float));
    for (int group = 0; group < num_groups_; group += in_pairs ? 2 : 1) {
      const T* from = weights[0] + group * GROUP_TOKENS;
      const char* values = keys_[group] + cache_.half_bytes() + vector * TILE_ROW_BYTES;
      if (in_pairs) {
        load_tile<LEFT>(from, WEIGHTS_STRIDE);
        load_tile<RIGHT>(values, dim_ * 4);
        dot_tiles_bf16<SUMS, LEFT, RIGHT>();
      } else {
        load_tile<LEFT + 1>(from, WEIGHTS_STRIDE);
        load_tile<RIGHT + 1>(values, dim_ * 4);
        dot_tiles_bf16<SUMS, LEFT + 1, RIGHT + 1>();
      }
    }
    store_tile<SUMS>(out, dim_ * sizeof(float));
  }
#endif

  // Convert one row's scores into weights; return the factor of the row's sums so far.
  INLINE float weigh(int64_t start, int row, vf (&s)[VECTORS], T* weights) {
    const int64_t at = position(row), seen = a_.first_seen(at);
    const bool partial = start + TILE_TOKENS - 1 > at || start < seen;
    vf most = splat(LOWEST);
    if (a_.soft_cap > 0)
      UNROLL for (int v = 0; v < VECTORS; v++) s[v] = cap(s[v], a_.soft_cap * LOG2_E);
    if (a_.slopes) fall(s, (float)(start - at), a_.slopes[kv_head_ * heads_ + row % heads_]);
    UNROLL for (int v = 0; v < VECTORS; v++) {
      if (partial) s[v] = masked(s[v], (int)(start + v * LANES - at), (int)(seen - at));
      most = max(most, s[v]);
    }
    const float before = scratch_.maxima[row], now = std::max(before, max_lane(most));
    vf sum = load<vf>(&scratch_.sums[row * LANES]);
    float shrink = 1.0f;  // 2^0: most tiles do not raise the maximum
    if (now != before) {
      shrink = exp2(splat(before - now))[0];
      sum *= shrink;
      scratch_.maxima[row] = now;
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
      const vf p = exp2(s[v] - now);
      sum += p;
      if constexpr (sizeof(T) == 2)
        store(weights + v * LANES, narrow(p));
      else
        store(weights + v * LANES, p);
    }
    store(&scratch_.sums[row * LANES], sum);
    return shrink;
  }

  // Scores fall with the distance of keys; `ahead` is that of the first one. ALiBi, arXiv:2108.12409.
  static void fall(vf (&s)[VECTORS], float ahead, float slope) {
    UNROLL for (int v = 0; v < VECTORS; v++)
      s[v] = fma(to_float(load<vi>(IOTA)) + (ahead + v * LANES), splat(slope * LOG2_E), s[v]);
  }

  // Positions of lane 0 and of the first visible key, relative to the query; positions above 0 are in
  // the future.
  static vf masked(vf s, int ahead, int seen) {
    const vi at = load<vi>(IOTA) + ahead;
    const vi hidden = (at > 0) | (at < seen);
    return bits_to_float((float_to_bits(s) & ~hidden) | (float_to_bits(splat(-3e38f)) & hidden));
  }

  template <int MR, int NV>
  void add_values(int row, int vector, const T* weights, const float* shrink) {
    vf acc[MR][NV];
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int v = 0; v < NV; v++)
        acc[r][v] = load<vf>(&scratch_.out[(row + r) * dim_ + (vector + v) * LANES]) * shrink[r];
    for (int group = 0; group < num_groups_; group++) {
      const char* columns[NV];
      UNROLL for (int v = 0; v < NV; v++)
        columns[v] = keys_[group] + cache_.half_bytes() + (vector + v) * 64;
      dot_columns<Step, MR, NV>(acc, weights + group * GROUP_TOKENS, TILE_TOKENS, columns,
                                (int64_t)dim_ * 4, GROUP_TOKENS / Step::K);
    }
    UNROLL for (int r = 0; r < MR; r++)
      UNROLL for (int v = 0; v < NV; v++)
        store(&scratch_.out[(row + r) * dim_ + (vector + v) * LANES], acc[r][v]);
  }

  void give_back() const {
    for (int row = 0; row < rows_; row++) {
      const float inverse = 1.0f / sum(load<vf>(&scratch_.total_sums[row * LANES]));
      const float* from = &scratch_.total_out[row * dim_];
      const int64_t to = (int64_t)(first_ + row / heads_) * a_.out_stride +
                         (kv_head_ * heads_ + row % heads_) * cache_.head_dim;
      for_vectors(cache_.head_dim, [&](int d, int count) {
        const vf value = load_some(from + d, count) * inverse;
        if (a_.out_is_bf16)
          store_some((bf16*)a_.out + to + d, value, count);
        else
          store_some((float*)a_.out + to + d, value, count);
      });
    }
  }

  const Attention& a_;
  const KvCache& cache_;
  const Batch& batch_;
  AttentionScratch& scratch_;
  const int32_t* table_;
  const int first_, heads_, rows_, dim_, query_dim_, kv_head_;
  int num_groups_ = 0;
  const char* keys_[TILE_TOKENS / GROUP_TOKENS];
};

}  // namespace

void AttentionScratch::reserve(const Attention& attention) {
  const size_t count = attention.block_tokens() * attention.heads_per_kv();
  const size_t rows = HAS_TILES ? (count + TILE_SIDE - 1) / TILE_SIDE * TILE_SIDE : count;
  const size_t dim = padded_query(attention.cache.padded_dim());
  const auto grow = [](auto& buffer, size_t size) { buffer.resize(std::max(buffer.size(), size)); };
  grow(out, rows * dim);
  grow(sums, rows * LANES);
  grow(maxima, rows);
  grow(total_out, rows * dim);
  grow(total_sums, rows * LANES);
  grow(total_maxima, rows);
  grow(queries, rows * dim * sizeof(float));
}

void store_kv(const KvCache& cache, int layer, const float* key, const float* value, int64_t slot) {
  for (int head = 0; head < cache.num_kv_heads; head++) {
    char* keys = cache.keys(layer, slot / cache.page_size, head);
    const int offset = (int)(slot % cache.page_size), at = head * cache.head_dim;
    if (cache.is_bf16)
      store_rows<StepBF16>(cache, keys, key + at, value + at, offset);
    else
      store_rows<StepF32>(cache, keys, key + at, value + at, offset);
  }
}

Partitions partitions_of(const Attention& attention, const Batch& batch, int first, int last) {
  return {attention.first_seen(batch.positions[first]) / PARTITION_TOKENS,
          batch.positions[last] / PARTITION_TOKENS};
}

int64_t partition_size(const Attention& attention, int num_tokens) {
  return (int64_t)num_tokens * attention.heads_per_kv() *
         (attention.cache.padded_dim() + LANES + 1);
}

namespace {

template <class Body>
void with_block(const Attention& attention, const Batch& batch, const Queries& queries,
                AttentionScratch& scratch, Body&& body) {
  if (attention.cache.is_bf16)
    body(Block<StepBF16>(attention, batch, queries, scratch));
  else
    body(Block<StepF32>(attention, batch, queries, scratch));
}

}  // namespace

void attend(const Attention& attention, const Batch& batch, const Queries& queries,
            AttentionScratch& scratch) {
  with_block(attention, batch, queries, scratch, [](auto&& block) { block.run(); });
}

void attend_partition(const Attention& attention, const Batch& batch, const Queries& queries,
                      int64_t partition, float* part, AttentionScratch& scratch) {
  with_block(attention, batch, queries, scratch,
             [&](auto&& block) { block.run_partition(partition, part); });
}

void join_partitions(const Attention& attention, const Batch& batch, const Queries& queries,
                     float* parts, int count, AttentionScratch& scratch) {
  with_block(attention, batch, queries, scratch,
             [&](auto&& block) { block.finish(parts, count); });
}

}  // namespace remora
