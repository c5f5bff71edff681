// Operations around multi-head latent attention (arXiv:2405.04434). Heads are multiplied with their
// own matrices before and after attention, so that the cache entry of a token, one latent and one
// rotary key, serves as K and V of all heads.
#pragma once

#include <vector>

#include "program.h"

namespace remora {

// out[t][head] = W_head x[t][head], for rows of float or bf16
class MultiplyHeads : public Operation {
 public:
  struct Settings {
    int num_heads;
    int x_step, out_step;  // elements from one head to the next
  };
  // weights: one per head, all of one shape
  MultiplyHeads(const Settings& settings, const Weight* weights, Rows x, Output out)
      : s_(settings), weights_(weights, weights + settings.num_heads), x_(x), out_(out) {}
  void prepare(const Batch&) override { stage_ = new_stage(); }
  int num_chunks(const Batch& batch, int num_threads) const override;
  void run_chunk(const Batch& batch, int num_threads, int chunk, int thread) override;

 private:
  Division divide(const Batch& batch, int num_threads) const;

  const Settings s_;
  const std::vector<Weight> weights_;
  const Rows x_;
  const Output out_;
  uint64_t stage_ = 0;
};

// Assembles a token's input of attention: the query of each head, then the cache entry, each with
// latent elements first and rotary elements last.
class JoinLatents : public RowOperation {
 public:
  struct Settings {
    int num_heads, key_size, rotary_size;
    NormWeights norm;       // of the latent
    const float* absorbed;  // [T][num_heads], queries in the latent space
    int absorbed_stride, absorbed_step;
    const float* query;  // [T][num_heads][key_size + rotary_size]
    int query_stride;
    const float* kept;  // [T][latent, then rotary_size]
    int kept_stride;
    float* heads;  // [T][num_heads + 1][latent, then rotary_size]
    int heads_stride;
  };
  explicit JoinLatents(const Settings& settings) : RowOperation(false), s_(settings) {}
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const Settings s_;
};

// out[t] = the first elements of each head, concatenated, in the input format of a product
class JoinHeads : public RowOperation {
 public:
  struct Settings {
    const float* x;  // [T][num_heads]
    int stride, step;
    int num_heads, size;
  };
  JoinHeads(const Settings& settings, Format format, Rows out)
      : RowOperation(false), s_(settings), format_(format), out_(out) {}
  void reserve(int num_threads) override;
  void run_row(const Batch& batch, int row, int thread) override;

 private:
  const Settings s_;
  const Format format_;
  const Rows out_;
  std::vector<std::vector<float>> joined_;
};

}  // namespace remora
