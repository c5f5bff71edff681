// Expert layers: routing, and products of each chosen expert with its tokens.
//
// A token and one of its experts form a pair. Pairs are sorted by expert, so that an expert's weight
// is read once for all its tokens, and by token within an expert. A row's result does not depend on
// other rows.
#pragma once

#include <vector>

#include "program.h"

namespace remora {

// Routing rule of a model; E experts, k of them per token.
struct Routing {
  int num_experts, top_k;
  bool is_sigmoid;       // scores are sigmoids of logits; else one softmax
  bool by_logits;        // choose by logits, whose order equals that of scores up to rounding
  bool is_normalised;    // weights of a token are divided by their sum
  float scaling;         // final factor of weights
  int num_groups, top_groups, group_best;  // experts come from the best groups of experts
  const float* correction;  // [E] added to scores for the choice but not to weights, or null
};

// Chosen experts and sorted pairs; rewritten by every layer.
struct Choices {
  int num_experts, top_k;
  int block_rows;    // most pairs of one expert that are multiplied together
  int32_t* ids;      // [T][k] experts of a token, best first
  float* weights;    // [T][k]
  int32_t* tokens;   // [T * k] token of each sorted pair
  int32_t* places;   // [T][k] index of each pair in the sorted order
  int32_t* starts;   // [E + 1] first sorted pair of each expert
  int32_t* blocks;   // [most_blocks(T)] first pair of each block of one expert's pairs; then -1
  // Largest number of blocks for so many tokens: every chosen expert can have one partial block.
  int most_blocks(int num_tokens) const {
    const int pairs = num_tokens * top_k;
    return pairs / block_rows + (pairs < num_experts ? pairs : num_experts);
  }
};

// Computes ids and weights from the router's logits [T][stride].
class Route : public RowOperation {
 public:
  Route(const Routing& routing, const float* logits, int stride, const Choices& out)
      : RowOperation(false), routing_(routing), logits_(logits), stride_(stride), out_(out) {}
  void reserve(int num_threads) override;
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  struct Scratch {
    std::vector<float> scores, choice;  // of each expert
  };
  void leave_best_groups(std::vector<float>& choice) const;

  const Routing routing_;
  const float* logits_;
  const int stride_;
  const Choices out_;
  std::vector<Scratch> scratch_;
};

// Computes the rest of `Choices` from ids.
class SortPairs : public Operation {
 public:
  explicit SortPairs(const Choices& choices) : c_(choices), next_(choices.num_experts) {}
  int num_chunks(const Batch& batch, int) const override { return batch.num_tokens > 0; }
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  const Choices c_;
  std::vector<int32_t> next_;
};

// out[p] = x[tokens[p]], for every sorted pair p
class Gather : public RowOperation {
 public:
  Gather(Format format, Rows x, Rows out, const Choices& choices)
      : RowOperation(false, choices.top_k), format_(format), x_(x), out_(out), c_(choices) {}
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const Format format_;
  const Rows x_, out_;
  const Choices c_;
};

// out[t] = weights[t] * x[t] in a format, for models that weigh the inputs of experts. A token has
// one expert; its weight is then set to 1, so that the output is not weighted again.
class Weigh : public RowOperation {
 public:
  Weigh(const float* x, int stride, int size, Format format, Rows out, const Choices& choices)
      : RowOperation(false), x_(x), stride_(stride), size_(size), format_(format), out_(out),
        c_(choices) {}
  void reserve(int num_threads) override;
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const float* x_;
  const int stride_, size_;
  const Format format_;
  const Rows out_;
  const Choices c_;
  std::vector<std::vector<float>> weighed_;
};

// Multiplies rows of sorted pairs with their experts' weights, all of one shape.
class MultiplyExperts : public Operation {
 public:
  MultiplyExperts(const Weight* weights, Rows x, Output out, const Choices& choices)
      : weights_(weights, weights + choices.num_experts), x_(x), out_(out), c_(choices) {}
  void prepare(const Batch&) override { stage_ = new_stage(); }
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  Division divide(const Batch& batch, int num_threads) const;

  const std::vector<Weight> weights_;
  const Rows x_;
  const Output out_;
  const Choices c_;
  uint64_t stage_ = 0;
};

// out[t] += the sum over k of weights[t][k] * x[places[t][k]]
class AddWeighted : public RowOperation {
 public:
  struct Settings {
    const float* x;
    int x_stride, size;
    const float* weights;  // [T][weights_stride]
    int weights_stride, top_k;
    const int32_t* places;  // [T][top_k]; null = token t has only row t
    float* out;
    int out_stride;
  };
  explicit AddWeighted(const Settings& settings) : RowOperation(false), s_(settings) {}
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const Settings s_;
};

}  // namespace remora
