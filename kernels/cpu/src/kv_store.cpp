#include "attention.h"
#include "dot.h"
#include "head_vectors.h"
#include "quantised_kv.h"

namespace remora {

namespace {

template <class Step>
void store_rows(const KvCache& cache, char* keys, const float* key, const float* value, int offset) {
  typedef typename Step::stored T;
  const int dim = cache.padded_dim(), group = offset / GROUP_TOKENS, lane = offset % GROUP_TOKENS;
  T* k = (T*)keys + (int64_t)group * GROUP_TOKENS * dim + lane * Step::K;
  T* v = (T*)(keys + cache.half_bytes()) + (int64_t)group * GROUP_TOKENS * dim;
  v += lane / Step::K * dim * Step::K;
  for_vectors(cache.head_dim, [&](int first, int count) {
    T keys_of[LANES];
    store_some(keys_of, finite<T>(load_some(key + first, count)), LANES);
    for (int i = 0; i < LANES; i += Step::K)
      memcpy(k + (first + i) * GROUP_TOKENS, keys_of + i, Step::K * sizeof(T));
    const vf values = finite<T>(load_some(value + first, count));
    if constexpr (Step::K == 2)
      store_halves(v + first * 2, narrow(values), lane % 2);
    else
      store_some(v + first, values, LANES);
  });
}

}  // namespace

void store_kv(const KvCache& cache, int layer, const float* key, const float* value, int64_t slot) {
  for (int head = 0; head < cache.num_kv_heads; head++) {
    char* keys = cache.keys(layer, slot / cache.page_size, head);
    const int offset = (int)(slot % cache.page_size), at = head * cache.head_dim;
    if (cache.is_quantised()) {
      const bf16* given = cache.static_scales;
      if (given) given += (int64_t)2 * layer * cache.num_kv_heads + head;
      store_quantised(cache, keys, key + at, value + at, offset, given);
      continue;
    }
    with_step(cache.format, [&](auto step) {
      store_rows<decltype(step)>(cache, keys, key + at, value + at, offset);
    });
  }
}

}  // namespace remora
