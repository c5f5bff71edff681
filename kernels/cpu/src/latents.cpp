#include "latents.h"

#include <algorithm>

namespace remora {

Division MultiplyHeads::divide(const Batch& batch, int num_threads) const {
  const Weight& weight = weights_[0];
  const int narrowest = narrowest_columns(weight.format, out_.epilogue, false);
  return {weight, s_.num_heads * weight.num_panels, narrowest, batch.num_tokens, num_threads};
}

int MultiplyHeads::num_chunks(const Batch& batch, int num_threads) const {
  return divide(batch, num_threads).num_chunks();
}

void MultiplyHeads::run_chunk(const Batch& batch, int num_threads, int chunk, int) {
  auto [columns, first, last] = divide(batch, num_threads).chunk(chunk);
  if (first == last) return;
  const int head = columns.panel / weights_[0].num_panels;
  columns.panel %= weights_[0].num_panels;
  const Weight& weight = weights_[head];
  Rows x = x_;
  x.values = (char*)x.values + (int64_t)head * s_.x_step * number_bytes(format_of_rows(weight.format));
  Output out = out_;
  out.values = (float*)out.values + (int64_t)head * s_.out_step;
  multiply_panel(weight, x, out, columns, first, last, nullptr, stage_);
}

void JoinLatents::run_row(const Batch&, int row, int) {
  const int size = s_.norm.size;
  const float* absorbed = s_.absorbed + (int64_t)row * s_.absorbed_stride;
  const float* query = s_.query + (int64_t)row * s_.query_stride;
  const float* kept = s_.kept + (int64_t)row * s_.kept_stride;
  float* to = s_.heads + (int64_t)row * s_.heads_stride;
  for (int head = 0; head < s_.num_heads; head++, to += size + s_.rotary_size) {
    std::copy_n(absorbed + head * s_.absorbed_step, size, to);
    const float* rotated = query + head * (s_.key_size + s_.rotary_size) + s_.key_size;
    std::copy_n(rotated, s_.rotary_size, to + size);
  }
  normalize(s_.norm, kept, to);
  std::copy_n(kept + size, s_.rotary_size, to + size);
}

void JoinHeads::reserve(int num_threads) {
  joined_.assign(num_threads, std::vector<float>(s_.num_heads * s_.size));
}

void JoinHeads::run_row(const Batch&, int row, int thread) {
  float* joined = joined_[thread].data();
  const float* x = s_.x + (int64_t)row * s_.stride;
  for (int head = 0; head < s_.num_heads; head++)
    std::copy_n(x + head * s_.step, s_.size, joined + head * s_.size);
  write_row(joined, s_.num_heads * s_.size, format_, out_, row);
}

}  // namespace remora
