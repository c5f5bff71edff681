#include "program.h"

#include <algorithm>

namespace remora {

namespace {

// Enough chunks to balance threads, few enough that claiming them is cheap, and as many for each
// thread.
int row_chunks(int rows, int num_threads) {
  constexpr int MOST_ROWS = 16;
  return std::min(rows, num_threads * std::max(4, ceil_div(rows, MOST_ROWS * num_threads)));
}

// Rotate the pairs (i, i + half) of a head by the angles of its position.
void rotate_halves(float* x, const float* cosines, const float* sines, int half) {
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const vf a = load<vf>(x + i), b = load<vf>(x + half + i);
    const vf cosine = load<vf>(cosines + i), sine = load<vf>(sines + i);
    store(x + i, a * cosine - b * sine);
    store(x + half + i, b * cosine + a * sine);
  }
  for (; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + half] = b * cosines[i] + a * sines[i];
  }
}

// Rotate the pairs (2 i, 2 i + 1).
void rotate_neighbours(float* x, const float* cosines, const float* sines, int num_pairs) {
  for (int i = 0; i < num_pairs; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cosines[i] - b * sines[i];
    x[2 * i + 1] = b * cosines[i] + a * sines[i];
  }
}

}  // namespace

void write_row(const float* x, int size, Format format, const Rows& out, int64_t row) {
  if (format == F32) {
    std::copy_n(x, size, (float*)out.values + row * out.stride);
  } else if (format == BF16) {
    bf16* to = (bf16*)out.values + row * out.stride;
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, narrow(load<vf>(x + i)));
    for (; i < size; i++) to[i] = narrow(x[i]);
  } else {
    const int group = group_size(format), groups = out.stride / group;
    quantize_row(x, size, group, (int8_t*)out.values + row * out.stride, padded_k(format, size),
                 out.scales + row * groups, out.sums + row * groups);
  }
}

int RowOperation::num_chunks(const Batch& batch, int num_threads) const {
  return row_chunks(num_rows(batch), num_threads);
}

void RowOperation::run_chunk(const Batch& batch, int num_threads, int chunk, int thread) {
  const int rows = num_rows(batch), chunks = row_chunks(rows, num_threads);
  const int last = part_start(rows, chunk + 1, chunks);
  for (int row = part_start(rows, chunk, chunks); row < last; row++) run_row(batch, row, thread);
}

void Embed::run_row(const Batch& batch, int row, int) {
  float* to = stream_ + (int64_t)row * stride_;
  const int64_t from = (by_position_ ? batch.positions : batch.token_ids)[row] * size_;
  for (int i = 0; i < size_; i++) {
    const float value = number_at(format_, table_, from + i);
    to[i] = by_position_ ? to[i] + value : value;
  }
}

void Norm::reserve(int num_threads) {
  scratch_.assign(num_threads, std::vector<float>(weights_.size));
}

void Norm::run_row(const Batch& batch, int row, int thread) {
  const int64_t from = gathers_ ? batch.logit_index[row] : row;
  float* normal = scratch_[thread].data();
  normalize(weights_, x_ + from * stride_, normal);
  if (!adds_) return write_row(normal, weights_.size, format_, out_, row);
  float* to = (float*)out_.values + (int64_t)row * out_.stride;
  for (int i = 0; i < weights_.size; i++) to[i] += normal[i];
}

void Round::run_row(const Batch&, int row, int) {
  write_row(x_ + (int64_t)row * stride_, size_, format_, out_, row);
}

void RotateAndStore::run_row(const Batch& batch, int row, int) {
  const int dim = s_.cache.head_dim, num_kv_heads = s_.cache.num_kv_heads;
  float* queries = s_.qkv + (int64_t)row * s_.stride;
  float* keys = queries + s_.num_heads * dim;
  if (s_.query_factors) {
    const float factor = s_.query_factors[batch.positions[row]];
    for (int i = 0; i < s_.num_heads * dim; i++) queries[i] *= factor;
  }
  if (s_.query_norm.weight) normalize(s_.query_norm, queries, queries);
  if (s_.key_norm.weight) normalize(s_.key_norm, keys, keys);
  const int64_t angles = batch.positions[row] * s_.num_pairs;
  const auto rotate = s_.is_interleaved ? rotate_neighbours : rotate_halves;
  for (int head = 0; head < s_.num_heads + num_kv_heads; head++)
    rotate(queries + head * dim + s_.first, s_.cosines + angles, s_.sines + angles, s_.num_pairs);
  const float* values = s_.keys_are_values ? keys : keys + num_kv_heads * dim;
  store_kv(s_.cache, s_.layer, keys, values, s_.cache.slots(batch)[row]);
}

void Shrink::prepare(const Batch&) {
  int most = 0;
  for (const auto& block : rows_.blocks()) most = std::max(most, low_.ranks[block.slot]);
  num_pieces_ = ceil_div(most, PIECE);
  stage_ = new_stage();
}

int Shrink::num_chunks(const Batch&, int) const {
  return (int)rows_.blocks().size() * low_.num_parts * num_pieces_;
}

void Shrink::run_chunk(const Batch&, int, int chunk, int) {
  const auto& block = rows_.blocks()[chunk / num_pieces_ / low_.num_parts];
  const int part = chunk / num_pieces_ % low_.num_parts, first = chunk % num_pieces_ * PIECE;
  const int last = std::min(first + PIECE, low_.ranks[block.slot]);
  if (first < last) shrink(low_, block, part, first, last, x_, x_is_bf16_, stride_, stage_);
}

int UpdateEmbedded::num_chunks(const Batch&, int) const { return (int)rows_.rows().size(); }

void UpdateEmbedded::run_chunk(const Batch& batch, int, int chunk, int) {
  const int row = rows_.rows()[chunk];
  shrink_one_hot(low_, rows_.adapters()[row], row, batch.token_ids[row]);
  const Updates updates{low_, rows_.adapters(), false};
  for (int column = 0; column < low_.outputs; column += TILE_COLUMNS) {
    float* to = stream_ + (int64_t)row * stride_ + column;
    const size_t bytes = std::min(TILE_COLUMNS, low_.outputs - column) * sizeof(float);
    float sums[TILE_COLUMNS] = {};
    memcpy(sums, to, bytes);
    updates.expand(row, 1, column, sums);
    memcpy(to, sums, bytes);
  }
}

Division Multiply::divide(const Batch& batch, int num_threads) const {
  const int narrowest = narrowest_columns(weight_.format, out_.epilogue, has_updates());
  return {weight_, weight_.num_panels, narrowest, num_rows(batch), num_threads};
}

int Multiply::num_chunks(const Batch& batch, int num_threads) const {
  return divide(batch, num_threads).num_chunks();
}

void Multiply::run_chunk(const Batch& batch, int num_threads, int chunk, int) {
  const auto [columns, first, last] = divide(batch, num_threads).chunk(chunk);
  if (first == last) return;
  if (!has_updates())
    return multiply_panel(weight_, x_, out_, columns, first, last, nullptr, stage_);
  const Updates updates{*low_, rows_.adapters(), out_.epilogue == GATED};
  multiply_panel(weight_, x_, out_, columns, first, last, &updates, stage_);
}

void Attend::reserve(int num_threads) {
  scratch_.resize(num_threads);
  for (auto& scratch : scratch_) scratch.reserve(a_);
  if (!a_.cache.is_quantised()) return;
  if ((int)groups_.size() < num_threads) groups_.resize(num_threads);
  for (int thread = 0; thread < num_threads; thread++) {
    groups_[thread].reserve(a_.cache);
    scratch_[thread].groups = &groups_[thread];
  }
}

void Attend::prepare(const Batch& batch) {
  first_block_.assign(1, 0);
  for (int s = 0; s < batch.num_sequences; s++)
    first_block_.push_back(first_block_.back() +
                           ceil_div(batch.starts[s + 1] - batch.starts[s], a_.block_tokens()));
  divide(batch);
}

// Blocks that are too few to keep all threads busy are divided into partitions, as far as there is
// room for their sums.
void Attend::divide(const Batch& batch) {
  divided_.clear();
  parts_.clear();
  const int num_threads = (int)scratch_.size(), num_blocks = first_block_.back() * a_.cache.num_kv_heads;
  if (num_threads == 1 || num_blocks >= ENOUGH_CHUNKS * num_threads) return;
  int64_t used = 0;
  const int heads = a_.cache.num_kv_heads;
  for (int block = 0; block < num_blocks; block++) {
    const Queries queries = queries_of(batch, block);
    const Partitions seen = partitions_of(a_, batch, queries.first, queries.last - 1);
    const int count = (int)(seen.last - seen.first) + 1;
    const int64_t size = partition_size(a_, queries.last - queries.first);
    const bool fits = used + count * size <= sums_.size();
    divided_.emplace_back(queries, seen.first, count > 1 && fits ? count : 1, sums_.data() + used);
    if (divided_.back().count > 1) used += count * size;
    if (queries.kv_head == heads - 1) order_parts(block + 1 - heads, block + 1);
  }
}

// Parts of blocks [first, last), which differ in their head: pages hold heads side by side, and are read
// in that order.
void Attend::order_parts(int first, int last) {
  int most = 0;
  for (int block = first; block < last; block++) most = std::max(most, divided_[block].count);
  for (int part = 0; part < most; part++)
    for (int block = first; block < last; block++)
      if (part < divided_[block].count) parts_.push_back({block, part});
}

Partition Attend::partition_of(const Part& part) const {
  return {divided_[part.whole].queries, divided_[part.whole].first + part.part};
}

Queries Attend::queries_of(const Batch& batch, int chunk) const {
  const int num_heads = a_.cache.num_kv_heads, block = chunk / num_heads;
  const auto above = std::upper_bound(first_block_.begin(), first_block_.end(), block);
  const int sequence = (int)(above - first_block_.begin()) - 1;
  const int size = a_.block_tokens();
  const int first = batch.starts[sequence] + (block - first_block_[sequence]) * size;
  return {sequence, first, std::min(first + size, batch.starts[sequence + 1]), chunk % num_heads};
}

int Attend::num_chunks(const Batch&, int) const {
  return divided_.empty() ? first_block_.back() * a_.cache.num_kv_heads : (int)parts_.size();
}

void Attend::run_chunk(const Batch& batch, int, int chunk, int thread) {
  AttentionScratch& scratch = scratch_[thread];
  if (divided_.empty()) return attend(a_, batch, queries_of(batch, chunk), scratch);
  Divided& whole = divided_[parts_[chunk].whole];
  if (whole.count == 1) return attend(a_, batch, whole.queries, scratch);
  const int64_t size = partition_size(a_, whole.queries.last - whole.queries.first);
  // Threads of the same speed take turns.
  const size_t after = chunk + scratch_.size();
  const Partition next = partition_of(parts_[after < parts_.size() ? after : chunk]);
  attend_partition(a_, batch, partition_of(parts_[chunk]), &next,
                   whole.sums + parts_[chunk].part * size, scratch);
  // The last one to finish joins the parts, always in their order.
  if (whole.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
    join_partitions(a_, batch, whole.queries, whole.sums, whole.count, scratch);
}

void Program::add(std::unique_ptr<Operation> operation) {
  operation->reserve(team_.num_threads());
  operations_.push_back(std::move(operation));
}

void Program::prepare(int first, int last) {
  tokens_.find(batch.adapters, nullptr, batch.num_tokens);
  logits_.find(batch.adapters, batch.logit_index, batch.num_logits);
  for (int at = first; at < last; at++) operations_[at]->prepare(batch);
}

void Program::count_chunks(int* num_chunks) {
  prepare(0, (int)operations_.size());
  for (const auto& operation : operations_)
    *num_chunks++ = operation->num_chunks(batch, team_.num_threads());
}

void Program::run(int first, int last) {
  prepare(first, last);
  for (first_ = first; first_ < last; first_ = last_) {
    last_ = std::min(last, first_ + Team::MAX_STAGES);
    team_.run(*this);
  }
}

int Program::num_chunks(int stage) const {
  return operations_[first_ + stage]->num_chunks(batch, team_.num_threads());
}

void Program::run_chunk(int stage, int chunk, int thread) {
  operations_[first_ + stage]->run_chunk(batch, team_.num_threads(), chunk, thread);
}

}  // namespace remora
