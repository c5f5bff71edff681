#include "attention.h"

#include <algorithm>

#include "activation.h"
#include "byte_pairs.h"
#include "byte_products.h"
#include "dot.h"
#include "head_vectors.h"
#include "quantised_kv.h"
#include "score_rules.h"
#include "tile_attention.h"

namespace remora {

namespace {

constexpr float LOWEST = -1e30f;  // finite: lowest minus lowest is 0
constexpr float LEAST = 1e-33f;   // greatest number of a row of zeros

// The rows of one block: queries of consecutive tokens, each with the heads that share K and V.
template <class Step>
class Block {
  typedef typename Step::element T;
  static constexpr int VECTORS = TILE_TOKENS / LANES;
  static constexpr bool BY_TILES = HAS_TILES && std::is_same_v<Step, StepBF16>;
  static constexpr bool BY_BYTES = HAS_BYTE_PRODUCTS && std::is_same_v<Step, StepBF16>;

 public:
  Block(const Attention& attention, const Batch& batch, const Queries& queries,
        AttentionScratch& scratch)
      : a_(attention),
        cache_(attention.cache),
        batch_(batch),
        scratch_(scratch),
        table_(attention.cache.table(batch, queries.sequence)),
        queries_(queries),
        first_(queries.first),
        heads_(attention.heads_per_kv()),
        rows_((queries.last - queries.first) * heads_),
        dim_(attention.cache.padded_dim()),
        query_dim_(padded_query<typename Step::stored>(dim_)),
        kv_head_(queries.kv_head),
        quantised_(attention.cache.is_quantised() ? scratch.groups : nullptr),
        widens_(quantised_ && !cache_.is_in_bytes()),
        half_bytes_(!widens_                ? cache_.half_bytes()
                    : values_replace_keys() ? 0
                                            : KvGroups::half_bytes(cache_)) {}

  // Attend to all partitions, one after the other.
  void run() {
    take_queries();
    begin();
    const Partitions seen = partitions_of(a_, batch_, first_, last_token());
    for (int64_t at = seen.first; at <= seen.last; at++) {
      const Partition next{queries_, at + 1};
      attend_partition(at, at < seen.last ? &next : nullptr);
      join({scratch_.out.data(), scratch_.sums.data(), scratch_.maxima.data()});
    }
    give_back();
  }

  // Attend to one partition and keep its sums in `part`.
  void run_partition(int64_t partition, const Partition* next, float* part) {
    take_queries();
    attend_partition(partition, next);
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
    for (int first = 0; first < rows_; first += LANES) {
      const int count = std::min(LANES, rows_ - first);
      const vf most = load_some(&scratch_.total_maxima[first], count);
      const vf more = load_some(part.maxima + first, count), now = max(most, more);
      store_some(&scratch_.total_maxima[first], now, count);
      float before[LANES], added[LANES];
      store(before, exp2(most - now)), store(added, exp2(more - now));
      for (int i = 0, row = first; i < count; i++, row++) {
        const auto add = [&](float* total, const float* more) {
          store(total, fma(load<vf>(more), splat(added[i]), load<vf>(total) * before[i]));
        };
        add(&scratch_.total_sums[row * LANES], part.sums + row * LANES);
        for (int d = 0; d < dim_; d += LANES)
          add(&scratch_.total_out[row * dim_ + d], part.out + row * dim_ + d);
      }
    }
  }

  void attend_partition(int64_t partition, const Partition* next) {
    const int64_t from = batch_.positions[first_], to = batch_.positions[last_token()];
    constexpr int TILES = PARTITION_TOKENS / TILE_TOKENS;
    const int64_t begin = std::max(a_.first_seen(from) / TILE_TOKENS, partition * TILES);
    const int64_t end = std::min(to / TILE_TOKENS, partition * TILES + TILES - 1);
    if constexpr (BY_TILES || BY_BYTES) {
      if (BY_TILES || cache_.is_in_bytes()) {
        locate(begin * TILE_TOKENS, std::min(to + 1, (end + 1) * TILE_TOKENS));
        if (cache_.is_in_bytes()) return attend_in_bytes(begin * TILE_TOKENS, next);
        return attend_by_tiles(begin * TILE_TOKENS);
      }
    }
    std::fill_n(scratch_.out.begin(), rows_ * dim_, 0.0f);
    std::fill_n(scratch_.sums.begin(), rows_ * LANES, 0.0f);
    std::fill_n(scratch_.maxima.begin(), rows_, LOWEST);
    for (int64_t tile = begin; tile <= end; tile++) {
      locate(tile * TILE_TOKENS, std::min(to + 1, (tile + 1) * TILE_TOKENS));
      if (widens_ && tile < end) prefetch_tile((tile + 1) * TILE_TOKENS);
      // A few rows at a time are computed completely while K and V of the tile stay in the L1 cache.
      for (int row = 0; row < rows_; row += TILE_ROWS)
        with_rows<TILE_ROWS>(std::min(rows_ - row, TILE_ROWS), [&](auto count) {
          attend_tile<decltype(count)::value>(tile * TILE_TOKENS, row);
        });
    }
  }

  const float* query(int row) const {
    return a_.qkv + (int64_t)(first_ + row / heads_) * a_.qkv_stride +
           (kv_head_ * heads_ + row % heads_) * cache_.head_dim;
  }

  void take_queries() {
    if (BY_BYTES && cache_.is_in_bytes()) return take_queries_in_bytes();
    T* queries = (T*)scratch_.queries.data();
    const float factor = a_.scale * LOG2_E;
    for (int row = 0; row < rows_; row++) {
      const float* from = query(row);
      T* to = queries + row * query_dim_;
      for_vectors(cache_.head_dim, [&](int d, int count) {
        store_some(to + d, load_some(from + d, count) * factor, count);
      });
      std::fill(to + cache_.head_dim, to + query_dim_, T{});
    }
  }

  // Find the groups of 16 positions in [from, to); those after them repeat the first one, up to a
  // whole tile.
  void locate(int64_t from, int64_t to) {
    num_groups_ = num_located_ = (int)((to - from + GROUP_TOKENS - 1) / GROUP_TOKENS);
    for (int group = 0; group < num_groups_; group++) {
      const int64_t at = from + group * GROUP_TOKENS;
      const int64_t page = table_[at / cache_.page_size], offset = at % cache_.page_size;
      const char* head = cache_.keys(a_.layer, page, kv_head_);
      heads_at_[group] = head, offsets_[group] = (int)offset;
      keys_[group] = head + offset * dim_ * (quantised_ ? 1 : sizeof(typename Step::stored));
      if (HAS_TILES && cache_.is_in_bytes()) prefetch_group(cache_, head, (int)offset);
      if (quantised_) quantised_->take_scales(cache_, head, (int)offset, group);
    }
    if (widens_) widen_keys();
    constexpr int TILE = TILE_TOKENS / GROUP_TOKENS;
    for (int group = num_groups_; group % TILE != 0; group++) keys_[group] = keys_[0];
    if (widens_ && !values_replace_keys()) widen_values();
  }

  // Begin to read the groups from position `from` on, while those before them are widened and multiplied.
  INLINE void prefetch_tile(int64_t from) const {
    for (int64_t at = from; at < from + TILE_TOKENS; at += GROUP_TOKENS)
      prefetch_group(cache_, cache_.keys(a_.layer, table_[at / cache_.page_size], kv_head_),
                     (int)(at % cache_.page_size));
  }

  // Few rows are done with K before they need V, and both then take turns in the first-level cache.
  bool values_replace_keys() const { return BY_TILES && rows_ <= 2 * TILE_SIDE; }

  // Pages lie anywhere, so the processor does not foresee the next one.
  void widen_keys() {
    constexpr int AHEAD = 4;
    const auto prefetch = [&](int group) {
      if (group < num_located_) prefetch_group(cache_, heads_at_[group], offsets_[group]);
    };
    for (int group = 0; group < AHEAD; group++) prefetch(group);
    for (int group = 0; group < num_located_; group++) {
      prefetch(group + AHEAD);
      keys_[group] = quantised_->widen_group(cache_, heads_at_[group], 0, offsets_[group], group, 0);
    }
  }

  void widen_values() {
    for (int group = 0; group < num_located_; group++)
      quantised_->widen_group(cache_, heads_at_[group], 1, offsets_[group], group, half_bytes_);
  }

  template <int MR>
  void attend_tile(int64_t start, int row) {
    const T* queries = (const T*)scratch_.queries.data() + row * query_dim_;
    vf scores[MR][VECTORS];
    for (int vector = 0; vector < VECTORS; vector += TILE_VECTORS) {
      vf acc[MR][TILE_VECTORS] = {};
      dot_columns<Step, MR, TILE_VECTORS>(acc, queries, query_dim_, keys_ + vector, Step::BYTES,
                                         dim_ / Step::K);
      UNROLL for (int r = 0; r < MR; r++)
        UNROLL for (int v = 0; v < TILE_VECTORS; v++)
          scores[r][vector + v] = quantised_ ? acc[r][v] * quantised_->key_scales(vector + v) : acc[r][v];
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

  // Attend to the located groups, which begin at position `start`, with all rows by tile registers.
  // Scores of 32 rows stay in the first-level cache until they are weights.
  void attend_by_tiles(int64_t start) {
#if REMORA_TILES
    num_groups_ += num_groups_ % 2;
    const TileProducts<bf16> products{dim_, query_dim_, num_groups_, keys_, half_bytes_};
    for (int row = 0; row < rows_; row += 2 * TILE_SIDE) {
      const int count = std::min(rows_ - row, 2 * TILE_SIDE);
      products.score((const T*)scratch_.queries.data() + row * query_dim_, count, scores_of(0));
      if (quantised_) {
        for (int r = 0; r < count; r++) scale_scores(scores_of(r));
        if (values_replace_keys()) widen_values();
      }
      // In two loops, so that rows overlap: the first has long chains of operations.
      for (int r = 0; r < count; r++)
        scratch_.maxima[row + r] = find_maximum(start, row + r, scores_of(r));
      for (int r = 0; r < count; r++)
        store(&scratch_.sums[(row + r) * LANES], weigh_all(scratch_.maxima[row + r], scores_of(r)));
      products.add_values(scores_of(0), count, &scratch_.out[row * dim_]);
    }
#endif
  }

  // The same with K and V in bytes: queries and weights are pairs of bytes, each pair two rows of products.
  void attend_in_bytes(int64_t start, const Partition* next) {
    num_groups_ = (num_groups_ + 3) / 4 * 4;
#if REMORA_TILES
    const TileProducts<int8_t> products{dim_, dim_, num_groups_, keys_, half_bytes_};
    const char* together = 2 * rows_ > TILE_SIDE ? bring_values_together() : nullptr;
#else
    const ReadAhead ahead = next ? ReadAhead(a_, batch_, *next) : ReadAhead();
    const ByteProducts products{dim_, num_groups_, keys_, half_bytes_, ahead};
#endif
    for (int row = 0; row < rows_; row += TILE_SIDE) {
      const int count = std::min(rows_ - row, TILE_SIDE);
      const int8_t* queries = (const int8_t*)scratch_.queries.data() + 2 * row * dim_;
      products.score(queries, 2 * count, scores_of(0));
      for (int r = 0; r < count; r++)
        join_scores(scratch_.query_scales[row + r], scores_of(2 * r), scores_of(2 * r + 1));
      for (int r = 0; r < count; r++)
        scratch_.maxima[row + r] = find_maximum(start, row + r, scores_of(2 * r));
      float scales[TILE_SIDE];
      for (int r = 0; r < count; r++)
        store(&scratch_.sums[(row + r) * LANES],
              weigh_in_bytes(scratch_.maxima[row + r], scores_of(2 * r), scales[r]));
#if REMORA_TILES
      products.add_values(scores_of(0), 2 * count, (float*)scratch_.products.data(), together);
#else
      products.add_values(scores_of(0), 2 * count, (float*)scratch_.products.data());
#endif
      for (int r = 0; r < count; r++) {
        const int32_t *high = &scratch_.products[2 * r * dim_], *low = high + dim_;
        for (int d = 0; d < dim_; d += LANES)
          store(&scratch_.out[(row + r) * dim_ + d],
                UnsignedPairs::joined(load<vi>(high + d), load<vi>(low + d)) * scales[r]);
      }
    }
  }

  // Many rows gain more by deep tiles of V than its groups take to copy.
  const char* bring_values_together() {
    const int64_t bytes = (int64_t)GROUP_TOKENS * dim_;
    for (int group = 0; group < num_groups_; group++)
      memcpy(&scratch_.values[group * bytes], keys_[group] + half_bytes_, bytes);
    return scratch_.values.data();
  }

  void take_queries_in_bytes() {
    for (int row = 0; row < rows_; row++) {
      int8_t* to = (int8_t*)scratch_.queries.data() + 2 * row * dim_;
      scratch_.query_scales[row] =
          store_pairs(query(row), cache_.head_dim, a_.scale * LOG2_E, to, dim_);
    }
  }

  __attribute__((noinline)) void join_scores(float scale, float* high, const float* low) const {
    for (int group = 0; group < num_groups_; group++) {
      const int at = group * LANES;
      const vf joined = SignedPairs::joined(load<vi>(high + at), load<vi>(low + at));
      store(high + at, joined * (quantised_->key_scales(group) * scale));
    }
  }

  // Convert one row's scores into pairs, in place; return their sum by lane.
  INLINE vf weigh_in_bytes(float greatest, float* scores, float& scale) const {
    const vf most = splat(greatest);
    vf sums = {}, largest = splat(LEAST);
    for (int group = 0; group < num_groups_; group++) {
      const vf p = exp2<exp2_of_fraction_short>(load<vf>(scores + group * LANES) - most);
      const vf weight = p * quantised_->value_scales(group);
      sums += p, largest = max(largest, weight);
      store(scores + group * LANES, weight);
    }
    const float divisor = max_lane(largest), inverse = UnsignedPairs::GREATEST / divisor;
    scale = divisor / UnsignedPairs::GREATEST;
    uint8_t *high = (uint8_t*)scores, *low = (uint8_t*)(scores + SCORES_STRIDE);
    for (int at = 0; at < num_groups_ * LANES; at += LANES)
      UnsignedPairs::store(load<vf>(scores + at) * inverse, high + at, low + at);
    return sums;
  }

  float* scores_of(int row) const { return scratch_.scores.data() + row * SCORES_STRIDE; }

  __attribute__((noinline)) void scale_scores(float* scores) const {
    for (int group = 0; group < num_groups_; group++)
      store(scores + group * LANES, load<vf>(scores + group * LANES) * quantised_->key_scales(group));
  }

  // Return the greatest of one row's scores, which are made final.
  INLINE float find_maximum(int64_t start, int row, float* scores) {
    const int64_t at = position(row), seen = a_.first_seen(at);
    const bool partial = start + num_groups_ * GROUP_TOKENS - 1 > at || start < seen;
    if (partial || a_.soft_cap > 0 || a_.slopes) adjust(start - at, seen - at, row, partial, scores);
    vf most[2] = {splat(LOWEST), splat(LOWEST)};
    for (int group = 0; group < num_groups_; group += 2)
      UNROLL for (int i = 0; i < 2; i++)
        most[i] = max(most[i], load<vf>(scores + (group + i) * LANES));
    return std::max(LOWEST, max_lane(max(most[0], most[1])));
  }

  // Convert one row's scores into weights, in place; return their sum by lane.
  INLINE vf weigh_all(float greatest, float* scores) const {
    const vf most = splat(greatest);
    vf sums[2] = {};
    for (int group = 0; group < num_groups_; group += 2) {
      vf p[2];
      UNROLL for (int i = 0; i < 2; i++) {
        p[i] = exp2<exp2_of_fraction_short>(load<vf>(scores + (group + i) * LANES) - most);
        sums[i] += p[i];
      }
      if (quantised_)
        UNROLL for (int i = 0; i < 2; i++) p[i] *= quantised_->value_scales(group + i);
      UNROLL for (int i = 0; i < 2; i++) store((bf16*)scores + (group + i) * LANES, narrow(p[i]));
    }
    return sums[0] + sums[1];
  }

  // Cap one row's scores, let them fall, and hide positions that the row does not see. The first score
  // and the first visible position are relative to the row's own.
  __attribute__((noinline)) void adjust(int64_t first, int64_t seen, int row, bool partial,
                                        float* scores) {
    for (int at = 0; at < num_groups_ * GROUP_TOKENS; at += LANES) {
      vf s = load<vf>(scores + at);
      if (a_.soft_cap > 0) s = cap(s, a_.soft_cap * LOG2_E);
      if (a_.slopes) s = fallen(s, (float)(first + at), a_.slopes[kv_head_ * heads_ + row % heads_]);
      if (partial) s = masked(s, (int)(first + at), (int)seen);
      store(scores + at, s);
    }
  }

  // Convert one row's scores into weights; return the factor of the row's sums so far.
  INLINE float weigh(int64_t start, int row, vf (&s)[VECTORS], T* weights) {
    const int64_t at = position(row), seen = a_.first_seen(at);
    const bool partial = start + TILE_TOKENS - 1 > at || start < seen;
    vf most = splat(LOWEST);
    if (a_.soft_cap > 0)
      UNROLL for (int v = 0; v < VECTORS; v++) s[v] = cap(s[v], a_.soft_cap * LOG2_E);
    if (a_.slopes)
      UNROLL for (int v = 0; v < VECTORS; v++)
        s[v] = fallen(s[v], (float)(start + v * LANES - at), a_.slopes[kv_head_ * heads_ + row % heads_]);
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
      store(weights + v * LANES, round_to<T>(quantised_ ? p * quantised_->value_scales(v) : p));
    }
    store(&scratch_.sums[row * LANES], sum);
    return shrink;
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
        columns[v] = keys_[group] + half_bytes_ + (vector + v) * Step::BYTES;
      dot_columns<Step, MR, NV>(acc, weights + group * GROUP_TOKENS, TILE_TOKENS, columns,
                                (int64_t)(dim_ / LANES) * Step::BYTES, GROUP_TOKENS / Step::K);
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
  const Queries queries_;
  const int first_, heads_, rows_, dim_, query_dim_, kv_head_;
  KvGroups* const quantised_;  // null = K and V are not quantised
  const bool widens_;          // quantised ones, before products
  const int64_t half_bytes_;  // from K to V of a located group
  int num_groups_ = 0, num_located_ = 0;
  const char* keys_[PARTITION_TOKENS / GROUP_TOKENS];
  const char* heads_at_[PARTITION_TOKENS / GROUP_TOKENS];  // in the page of each group
  int offsets_[PARTITION_TOKENS / GROUP_TOKENS];           // of its first token in the page
};

}  // namespace

void AttentionScratch::reserve(const Attention& attention) {
  const size_t count = attention.block_tokens() * attention.heads_per_kv();
  const size_t rows = HAS_TILES ? (count + TILE_SIDE - 1) / TILE_SIDE * TILE_SIDE : count;
  const size_t dim = padded_query<bf16>(attention.cache.padded_dim());
  out.reserve(rows * dim);
  sums.reserve(rows * LANES);
  maxima.reserve(rows);
  total_out.reserve(rows * dim);
  total_sums.reserve(rows * LANES);
  total_maxima.reserve(rows);
  if (HAS_TILES || attention.cache.is_in_bytes()) scores.reserve(2 * TILE_SIDE * SCORES_STRIDE);
  queries.reserve(rows * dim * sizeof(float));
  if (!attention.cache.is_in_bytes()) return;
  query_scales.reserve(rows);
  products.reserve(2 * TILE_SIDE * dim);
  values.reserve(PARTITION_TOKENS * dim);
}

namespace {

template <class Body>
void with_block(const Attention& attention, const Batch& batch, const Queries& queries,
                AttentionScratch& scratch, Body&& body) {
  with_step(attention.cache.format, [&](auto step) {
    body(Block<decltype(step)>(attention, batch, queries, scratch));
  });
}

}  // namespace

void attend(const Attention& attention, const Batch& batch, const Queries& queries,
            AttentionScratch& scratch) {
  with_block(attention, batch, queries, scratch, [](auto&& block) { block.run(); });
}

void attend_partition(const Attention& attention, const Batch& batch, const Partition& partition,
                      const Partition* next, float* part, AttentionScratch& scratch) {
  with_block(attention, batch, partition.queries, scratch,
             [&](auto&& block) { block.run_partition(partition.number, next, part); });
}

void join_partitions(const Attention& attention, const Batch& batch, const Queries& queries,
                     float* parts, int count, AttentionScratch& scratch) {
  with_block(attention, batch, queries, scratch,
             [&](auto&& block) { block.finish(parts, count); });
}

}  // namespace remora
