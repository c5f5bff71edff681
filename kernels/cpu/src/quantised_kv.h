// K and V in 8 bits with a scale for each token and head, as stored and as attention reads them.
//
// Codes of a head are in the order that attention.h describes, followed in the page by its
// scales in bf16: [K, V][page_size]. The scale maps the greatest magnitude of a token's head to the
// greatest number of the format, or it is that of the cache for all tokens, and greater magnitudes are
// clipped. Either way a token's bits depend on that token alone.
#pragma once

#include "attention.h"

namespace remora {

// Quantise a token's K and V of one head. `head`: of the page; `offset`: of the token in the page;
// `given`: the static scale of K, that of V being num_kv_heads further, or null.
void store_quantised(const KvCache& cache, char* head, const float* key, const float* value,
                     int offset, const bf16* given);

// Begin to read K, V and scales of the group at a page's token `offset`. Always inlined: a function that
// only prefetches has no effect in the eyes of GCC, which leaves out its calls.
INLINE void prefetch_group(const KvCache& cache, const char* head, int offset) {
  const int64_t bytes = (int64_t)GROUP_TOKENS * cache.padded_dim();
  for (int part = 0; part < 2; part++) {
    const char* from = head + part * cache.half_bytes() + (int64_t)offset * cache.padded_dim();
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
    const char* scales = head + 2 * cache.half_bytes();
    __builtin_prefetch(scales + (part * cache.page_size + offset) * sizeof(bf16));
  }
}

// Groups of one head: their scales, and K and V widened to the plain format of the cache; of one thread.
class KvGroups {
 public:
  void reserve(const KvCache& cache);

  // Take the scales of the group that begins at a page's token `offset`, as those of number `group`.
  void take_scales(const KvCache& cache, const char* head, int offset, int group) {
    const bf16* from = (const bf16*)(head + 2 * cache.half_bytes()) + offset;
    for (int part = 0; part < 2; part++)
      store(scales_[part] + group * GROUP_TOKENS, widen(load<vuh>(from + part * cache.page_size)));
  }
  // Widen its K or V (part 0 or 1) from byte `start` on; returns where.
  const char* widen_group(const KvCache& cache, const char* head, int part, int offset, int group,
                          int64_t start);

  static int64_t half_bytes(const KvCache& cache) {
    return (int64_t)PARTITION_TOKENS * cache.padded_dim() * number_bytes(cache.format);
  }
  // Scales of 16 tokens of K or V.
  vf key_scales(int group) const { return load<vf>(scales_[0] + group * GROUP_TOKENS); }
  vf value_scales(int group) const { return load<vf>(scales_[1] + group * GROUP_TOKENS); }

 private:
  Buffer<char> data_;  // zeroed, because tiles read past a group's end
  float scales_[2][PARTITION_TOKENS] = {};
};

}  // namespace remora
