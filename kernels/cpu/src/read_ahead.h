// Begins to read K and V of a partition into the second-level cache while another one is multiplied.
//
// Pages lie anywhere, so the processor does not foresee the next one. It waits for reads that begin all at
// once, and for reads into the first-level cache: a few lines between products cost nothing.
//
// Knows nothing of products.
#pragma once

#include <algorithm>

#include "quantised_kv.h"

namespace remora {

class ReadAhead {
 public:
  ReadAhead() = default;  // of nothing

  ReadAhead(const Attention& attention, const Batch& batch, const Partition& next)
      : bytes_(GROUP_TOKENS * attention.cache.padded_dim()) {
    const KvCache& cache = attention.cache;
    const int32_t* table = cache.table(batch, next.queries.sequence);
    const int64_t from = next.number * PARTITION_TOKENS;
    const int64_t to = std::min(from + PARTITION_TOKENS, batch.positions[next.queries.last - 1] + 1);
    for (int64_t at = from; at < to; at += GROUP_TOKENS) {
      const char* head = cache.keys(attention.layer, table[at / cache.page_size], next.queries.kv_head);
      for (int part = 0; part < 2; part++) {
        const int64_t offset = at % cache.page_size;
        codes_[part][num_groups_] = head + part * cache.half_bytes() + offset * cache.padded_dim();
        scales_[part][num_groups_] =
            head + 2 * cache.half_bytes() + (part * cache.page_size + offset) * sizeof(bf16);
      }
      num_groups_++;
    }
  }

  // Always inlined: a function that only prefetches has no effect in the eyes of GCC, which leaves out
  // its calls.
  INLINE void keys(int group) const { read<0>(group); }
  INLINE void values(int group) const { read<1>(group); }

 private:
  template <int PART>
  INLINE void read(int group) const {
    constexpr int FOR_READING = 0, SECOND_LEVEL = 2;
    if (group >= num_groups_) return;
    const char* from = codes_[PART][group];
    for (int at = 0; at < bytes_; at += 64) __builtin_prefetch(from + at, FOR_READING, SECOND_LEVEL);
    __builtin_prefetch(scales_[PART][group], FOR_READING, SECOND_LEVEL);
  }

  int num_groups_ = 0, bytes_ = 0;
  const char* codes_[2][PARTITION_TOKENS / GROUP_TOKENS];
  const char* scales_[2][PARTITION_TOKENS / GROUP_TOKENS];
};

}  // namespace remora
