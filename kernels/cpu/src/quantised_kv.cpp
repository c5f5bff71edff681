#include "quantised_kv.h"

#include <algorithm>

#include "head_vectors.h"

namespace remora {

namespace {

// Smaller heads become zeros: the quotient of two denormal numbers is not exact everywhere.
constexpr float LEAST_SIZE = 1e-30f;

// The scale that maps the greatest magnitude of a head to the format's greatest number.
template <class Codes>
INLINE bf16 own_scale(const float* head, int dim) {
  vf most = splat(LEAST_SIZE);
  for_vectors(dim, [&](int first, int count) {
    most = max(most, absolute(finite<float>(load_some(head + first, count))));
  });
  return narrow(max_lane(most) / Codes::GREATEST);
}

// Quantise one head; put(first element, codes) receives its vectors. Quotients beyond the format's
// range, of which own scales make none that is half a step away, become its greatest number.
template <class Codes, class Put>
INLINE void quantise(const float* head, int dim, bf16 scale, Put&& put) {
  const vf divisor = splat(widen(scale)), least = splat(-Codes::GREATEST), most = splat(Codes::GREATEST);
  for_vectors(dim, [&](int first, int count) {
    const vf quotient = finite<float>(load_some(head + first, count)) / divisor;
    const vf scaled = min(max(quotient, least), most);
    put(first, __builtin_convertvector(Codes::encode(scaled), vb));
  });
}

}  // namespace

void store_quantised(const KvCache& cache, char* head, const float* key, const float* value,
                     int offset, const bf16* given) {
  const int dim = cache.padded_dim(), group = offset / GROUP_TOKENS, lane = offset % GROUP_TOKENS;
  const int width = cache.width();
  const int64_t start = (int64_t)group * GROUP_TOKENS * dim;
  char* k = head + start + lane * width;
  char* v = head + cache.half_bytes() + start + lane / width * dim * width + lane % width;
  bf16* scales = (bf16*)(head + 2 * cache.half_bytes()) + offset;
  with_codes(cache.kv_format, [&](auto codes) {
    typedef decltype(codes) Codes;
    if (given) {
      scales[0] = given[0], scales[cache.page_size] = given[cache.num_kv_heads];
    } else {
      scales[0] = own_scale<Codes>(key, cache.head_dim);
      scales[cache.page_size] = own_scale<Codes>(value, cache.head_dim);
    }
    quantise<Codes>(key, cache.head_dim, scales[0], [&](int first, vb elements) {
      for (int i = 0; i < LANES; i++)
        k[(first + i) / width * GROUP_TOKENS * width + (first + i) % width] = elements[i];
    });
    quantise<Codes>(value, cache.head_dim, scales[cache.page_size], [&](int first, vb elements) {
      for (int i = 0; i < LANES; i++) v[(first + i) * width] = elements[i];
    });
  });
}

void KvGroups::reserve(const KvCache& cache) {
  if (!cache.is_in_bytes()) data_.reserve(2 * half_bytes(cache));
}

const char* KvGroups::widen_group(const KvCache& cache, const char* head, int part, int offset,
                                   int group, int64_t start) {
  const int64_t count = (int64_t)GROUP_TOKENS * cache.padded_dim();
  const char* from = head + part * cache.half_bytes() + (int64_t)offset * cache.padded_dim();
  char* to = data_.data() + start + group * count * number_bytes(cache.format);
  with_number(cache.format, [&](auto number) {
    with_codes(cache.kv_format, [&](auto codes) {
      widen<decltype(codes)>(from, count, (decltype(number)*)to);
    });
  });
  return to;
}

}  // namespace remora
