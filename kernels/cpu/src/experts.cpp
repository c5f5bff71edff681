#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace remora {

namespace {

constexpr float TINY = 1e-20f;  // keeps a sum of weights above zero

void score_together(const float* logits, int size, float* scores) {
  const float most = *std::max_element(logits, logits + size);
  float total = 0;
  for (int i = 0; i < size; i++) total += scores[i] = std::exp(logits[i] - most);
  for (int i = 0; i < size; i++) scores[i] /= total;
}

void score_apart(const float* logits, int size, float* scores) {
  for (int i = 0; i < size; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
}

// Remove the greatest value, the first among equals, and return its index; it becomes -infinity. NaN
// counts as the greatest, so that non-finite values reach the logits.
int take_best(float* values, int size) {
  int best = 0;
  for (int i = 1; i < size; i++)
    if (values[i] > values[best] || (std::isnan(values[i]) && !std::isnan(values[best]))) best = i;
  values[best] = -INFINITY;
  return best;
}

template <class T>
void copy_row(const void* from, int64_t from_row, void* to, int64_t to_row, int size) {
  memcpy((T*)to + to_row * size, (const T*)from + from_row * size, size * sizeof(T));
}

}  // namespace

void Route::reserve(int num_threads) {
  const std::vector<float> empty(routing_.num_experts);
  scratch_.assign(num_threads, {empty, empty});
}

// Every expert outside of the best groups becomes -infinity.
void Route::leave_best_groups(std::vector<float>& choice) const {
  const int size = routing_.num_experts / routing_.num_groups;
  std::vector<float> of_groups(routing_.num_groups);
  for (int group = 0; group < routing_.num_groups; group++) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = group * size; i < (group + 1) * size; i++) {
      second = std::max(second, std::min(best, choice[i]));
      best = std::isnan(choice[i]) ? choice[i] : std::max(best, choice[i]);  // NaN stays
    }
    of_groups[group] = routing_.group_best == 2 && size > 1 ? best + second : best;
  }
  std::vector<bool> is_left(routing_.num_groups);
  for (int i = 0; i < routing_.top_groups; i++)
    is_left[take_best(of_groups.data(), routing_.num_groups)] = true;
  for (int i = 0; i < routing_.num_experts; i++)
    if (!is_left[i / size]) choice[i] = -INFINITY;
}

void Route::run_row(const Batch&, int row, int thread) {
  const int size = routing_.num_experts;
  const float* logits = logits_ + (int64_t)row * stride_;
  auto& [scores, choice] = scratch_[thread];
  (routing_.is_sigmoid ? score_apart : score_together)(logits, size, scores.data());
  for (int i = 0; i < size; i++) {
    choice[i] = routing_.by_logits ? logits[i] : scores[i];
    if (routing_.correction) choice[i] += routing_.correction[i];
  }
  if (routing_.num_groups > 1) leave_best_groups(choice);
  int32_t* ids = out_.ids + (int64_t)row * out_.top_k;
  float* weights = out_.weights + (int64_t)row * out_.top_k;
  float total = routing_.is_normalised ? TINY : 0;
  for (int k = 0; k < out_.top_k; k++) {
    ids[k] = take_best(choice.data(), size);
    total += weights[k] = scores[ids[k]];
  }
  const float factor = routing_.scaling / (routing_.is_normalised ? total : 1.0f);
  for (int k = 0; k < out_.top_k; k++) weights[k] *= factor;
}

void SortPairs::run_chunk(const Batch& batch, int, int, int) {
  const int num_pairs = batch.num_tokens * c_.top_k;
  std::fill_n(c_.starts, c_.num_experts + 1, 0);
  for (int pair = 0; pair < num_pairs; pair++) c_.starts[c_.ids[pair] + 1]++;
  int num_blocks = 0;
  for (int expert = 0; expert < c_.num_experts; expert++) {
    next_[expert] = c_.starts[expert];
    c_.starts[expert + 1] += c_.starts[expert];
    for (int at = c_.starts[expert]; at < c_.starts[expert + 1]; at += c_.block_rows)
      c_.blocks[num_blocks++] = at;
  }
  std::fill(c_.blocks + num_blocks, c_.blocks + c_.most_blocks(batch.num_tokens), -1);
  for (int pair = 0; pair < num_pairs; pair++) {
    const int place = next_[c_.ids[pair]]++;
    c_.places[pair] = place;
    c_.tokens[place] = pair / c_.top_k;
  }
}

void Gather::run_row(const Batch&, int row, int) {
  const int from = c_.tokens[row];
  if (format_ == F32) return copy_row<float>(x_.values, from, out_.values, row, x_.stride);
  if (format_ == BF16) return copy_row<bf16>(x_.values, from, out_.values, row, x_.stride);
  const int groups = x_.stride / group_size(format_);
  copy_row<int8_t>(x_.values, from, out_.values, row, x_.stride);
  copy_row<float>(x_.scales, from, out_.scales, row, groups);
  copy_row<int32_t>(x_.sums, from, out_.sums, row, groups);
}

void Weigh::reserve(int num_threads) {
  weighed_.assign(num_threads, std::vector<float>(size_));
}

void Weigh::run_row(const Batch&, int row, int thread) {
  const float* x = x_ + (int64_t)row * stride_;
  float* weighed = weighed_[thread].data();
  for (int i = 0; i < size_; i++) weighed[i] = c_.weights[row] * x[i];
  c_.weights[row] = 1.0f;
  write_row(weighed, size_, format_, out_, row);
}

// The number of chunks is fixed before routing: the largest possible one. Blocks of few pairs are too
// few for many threads, which then divide panels.
Division MultiplyExperts::divide(const Batch& batch, int num_threads) const {
  const Weight& weight = weights_[0];
  const int narrowest = narrowest_columns(weight.format, out_.epilogue, false);
  const int num_panels = c_.most_blocks(batch.num_tokens) * weight.num_panels;
  return {weight, num_panels, narrowest, num_panels > 0, num_threads};
}

int MultiplyExperts::num_chunks(const Batch& batch, int num_threads) const {
  return divide(batch, num_threads).num_chunks();
}

void MultiplyExperts::run_chunk(const Batch& batch, int num_threads, int chunk, int) {
  Columns columns = divide(batch, num_threads).chunk(chunk).columns;
  const int first = c_.blocks[columns.panel / weights_[0].num_panels];
  if (first < 0) return;
  columns.panel %= weights_[0].num_panels;
  const int32_t* end = std::upper_bound(c_.starts, c_.starts + c_.num_experts + 1, first);
  const int expert = (int)(end - c_.starts) - 1, last = std::min(first + c_.block_rows, *end);
  multiply_panel(weights_[expert], x_, out_, columns, first, last, nullptr, stage_);
}

void AddWeighted::run_row(const Batch&, int row, int) {
  float* out = s_.out + (int64_t)row * s_.out_stride;
  const float* weights = s_.weights + (int64_t)row * s_.weights_stride;
  const auto x = [&](int k) {
    const int64_t from = s_.places ? s_.places[(int64_t)row * s_.top_k + k] : row;
    return s_.x + from * s_.x_stride;
  };
  int i = 0;
  for (; i + LANES <= s_.size; i += LANES) {
    vf total = {};
    for (int k = 0; k < s_.top_k; k++) total += load<vf>(x(k) + i) * weights[k];
    store(out + i, load<vf>(out + i) + total);
  }
  for (; i < s_.size; i++) {
    float total = 0;
    for (int k = 0; k < s_.top_k; k++) total += x(k)[i] * weights[k];
    out[i] += total;
  }
}

}  // namespace remora
