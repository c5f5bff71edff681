// A step program: the operations of a forward pass over bound buffers, run with one call.
//
// The caller builds it once, fills the batch's arrays before each run, and reads its buffers after.
// Operations run in the order of their addition, each on the whole team. A new kind of
// operation is a new class here and an entry in api.cpp.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "attention.h"
#include "batch.h"
#include "division.h"
#include "linear.h"
#include "low_rank.h"
#include "norm.h"
#include "quantised_kv.h"
#include "team.h"

namespace remora {

class Operation {
 public:
  virtual ~Operation() = default;
  virtual void reserve(int /*num_threads*/) {}  // memory of each thread, before the first run
  virtual void prepare(const Batch&) {}         // by one thread, before each run
  virtual int num_chunks(const Batch&, int num_threads) const = 0;
  virtual void run_chunk(const Batch&, int num_threads, int chunk, int thread) = 0;
};

// An operation on independent rows.
class RowOperation : public Operation {
 public:
  explicit RowOperation(bool on_logits, int rows_per_token = 1)
      : on_logits_(on_logits), rows_per_token_(rows_per_token) {}
  int num_rows(const Batch& batch) const {
    return on_logits_ ? batch.num_logits : batch.num_tokens * rows_per_token_;
  }
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;
  virtual void run_row(const Batch& batch, int row, int thread) = 0;

 private:
  const bool on_logits_;  // rows are those of logits, not tokens
  const int rows_per_token_;
};

// stream[t] = table[token_ids[t]], or stream[t] += table[positions[t]]
class Embed : public RowOperation {
 public:
  Embed(const void* table, Format format, int size, bool by_position, float* stream, int stride)
      : RowOperation(false), table_(table), format_(format), size_(size),
        by_position_(by_position), stream_(stream), stride_(stride) {}
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const void* table_;
  const Format format_;
  const int size_;
  const bool by_position_;
  float* stream_;
  const int stride_;
};

// out[r] = norm of x[r], in the format of the next product, or out[r] += the norm for float rows. For
// rows of logits, x is read at their tokens.
class Norm : public RowOperation {
 public:
  Norm(bool on_logits, const float* x, int stride, const NormWeights& weights, Format format,
       Rows out, bool adds)
      : RowOperation(on_logits), gathers_(on_logits), x_(x), stride_(stride), weights_(weights),
        format_(format), out_(out), adds_(adds) {}
  void reserve(int num_threads) override;
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const bool gathers_;
  const float* x_;
  const int stride_;
  const NormWeights weights_;
  const Format format_;
  const Rows out_;
  const bool adds_;
  std::vector<std::vector<float>> scratch_;
};

// Write `size` floats as row `row` of rows in a format.
void write_row(const float* x, int size, Format format, const Rows& out, int64_t row);

// out[r] = x[r], rounded to the input format of a product.
class Round : public RowOperation {
 public:
  Round(bool on_logits, int rows_per_token, const float* x, int stride, int size, Format format,
        Rows out)
      : RowOperation(on_logits, rows_per_token), x_(x), stride_(stride), size_(size),
        format_(format), out_(out) {}
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const float* x_;
  const int stride_, size_;
  const Format format_;
  const Rows out_;
};

// Normalise (if there are weights) and rotate the heads of q and k in place; store k and v. Queries
// may first be multiplied by a factor of their position.
class RotateAndStore : public RowOperation {
 public:
  struct Settings {
    KvCache cache;
    int layer, num_heads;
    float* qkv;
    int stride;
    const float *cosines, *sines;  // [positions][num_pairs]
    int first, num_pairs;          // rotary elements of each head; others are not rotated
    bool is_interleaved;  // pairs are neighbours; otherwise elements i and i + num_pairs
    const float* query_factors;     // [positions] or null
    NormWeights query_norm, key_norm;
    bool keys_are_values;  // k is also v
  };
  explicit RotateAndStore(const Settings& settings) : RowOperation(false), s_(settings) {}
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const Settings s_;
};

// low.shrunk = A_s x for rows with an adapter, the input of a product with these updates.
class Shrink : public Operation {
 public:
  Shrink(const AdapterRows& rows, const LowRank& low, const void* x, bool x_is_bf16, int stride)
      : rows_(rows), low_(low), x_(x), x_is_bf16_(x_is_bf16), stride_(stride) {}
  void prepare(const Batch& batch) override;
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  static constexpr int PIECE = HAS_TILES ? TILE_SIDE : 8;  // ranks of one part

  const AdapterRows& rows_;
  const LowRank low_;
  const void* x_;
  const bool x_is_bf16_;
  const int stride_;
  int num_pieces_ = 0;  // of a part, for the highest rank of the step
  uint64_t stage_ = 0;  // of the rows' contents
};

// stream[t] += B_s A_s e for tokens with an adapter; e is the one-hot vector of token_ids[t].
class UpdateEmbedded : public Operation {
 public:
  UpdateEmbedded(const AdapterRows& rows, const LowRank& low, float* stream, int stride)
      : rows_(rows), low_(low), stream_(stream), stride_(stride) {}
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  const AdapterRows& rows_;
  const LowRank low_;
  float* stream_;
  const int stride_;
};

class Multiply : public Operation {
 public:
  // low: updates to add, already shrunk for this product's x, or null
  Multiply(bool on_logits, Weight weight, Rows x, Output out, const AdapterRows& rows,
           const LowRank* low)
      : on_logits_(on_logits), weight_(weight), x_(x), out_(out), rows_(rows) {
    if (low) low_ = *low;
  }
  void prepare(const Batch&) override { stage_ = new_stage(); }
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  int num_rows(const Batch& batch) const {
    return on_logits_ ? batch.num_logits : batch.num_tokens;
  }
  bool has_updates() const { return low_ && !rows_.blocks().empty(); }
  Division divide(const Batch& batch, int num_threads) const;

  const bool on_logits_;
  const Weight weight_;
  const Rows x_;
  const Output out_;
  const AdapterRows& rows_;
  std::optional<LowRank> low_;
  uint64_t stage_ = 0;
};

// Memory for sums of partitions, shared by the program's operations. Untouched pages take none.
class PartitionSums {
 public:
  PartitionSums() : sums_(new float[SIZE]) {}
  float* data() const { return sums_.get(); }
  int64_t size() const { return SIZE; }

 private:
  static constexpr int64_t SIZE = 4 << 20;

  const std::unique_ptr<float[]> sums_;
};

class Attend : public Operation {
 public:
  Attend(const Attention& attention, const PartitionSums& sums, std::deque<KvGroups>& groups)
      : a_(attention), sums_(sums), groups_(groups) {}
  void reserve(int num_threads) override;
  void prepare(const Batch& batch) override;
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  // A block whose partitions are computed apart, unless there is only one.
  struct Divided {
    Divided(const Queries& queries, int64_t first, int count, float* sums)
        : queries(queries), first(first), count(count), sums(sums), left(count) {}
    const Queries queries;
    const int64_t first;  // partition
    const int count;      // of partitions
    float* const sums;
    std::atomic<int> left;
  };
  struct Part {
    int whole, part;
  };
  void divide(const Batch& batch);
  void order_parts(int first, int last);
  Partition partition_of(const Part& part) const;
  Queries queries_of(const Batch& batch, int chunk) const;

  const Attention a_;
  const PartitionSums& sums_;
  std::deque<KvGroups>& groups_;  // of each thread
  std::vector<int> first_block_;  // [S + 1] blocks of query tokens, counted over all sequences
  std::deque<Divided> divided_;   // empty if there are enough blocks
  std::vector<Part> parts_;       // of divided blocks
  std::vector<AttentionScratch> scratch_;
};

class Program : public Job {
 public:
  explicit Program(Team& team) : team_(team) {}

  Batch batch{};

  const PartitionSums& partition_sums() const { return partition_sums_; }
  std::deque<KvGroups>& kv_groups() { return kv_groups_; }
  // Adapter rows of the current step, for operations that are added.
  const AdapterRows& adapter_rows(bool on_logits) const { return on_logits ? logits_ : tokens_; }
  void add(std::unique_ptr<Operation> operation);
  // Run operations [first, last) on `batch`.
  void run(int first, int last);
  // Chunks of each operation for `batch`.
  void count_chunks(int* num_chunks);

  int num_stages() const override { return last_ - first_; }
  int num_chunks(int stage) const override;
  void run_chunk(int stage, int chunk, int thread) override;

 private:
  void prepare(int first, int last);

  Team& team_;
  PartitionSums partition_sums_;
  std::deque<KvGroups> kv_groups_;  // of each thread, shared by the operations
  AdapterRows tokens_, logits_;
  std::vector<std::unique_ptr<Operation>> operations_;
  int first_ = 0, last_ = 0;
};

}  // namespace remora
