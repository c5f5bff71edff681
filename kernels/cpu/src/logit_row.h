// Samples a token from a row of logits, and computes log-probabilities, without sorting the
// vocabulary.
//
// kernels/sampling.py specifies it: every filter is one threshold on the scaled logits, tokens equal
// to it stay, and the token is drawn by an exponential race. The vocabulary is read in blocks of 128,
// whose maxima tell later passes which blocks to skip. One thread computes a row in a fixed order, so
// other rows never change its result.
//
// Knows nothing of requests, seeds or threads.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

namespace remora {

// Parameters of a row, as in kernels/sampling.py; temperature 0 is greedy.
struct Filters {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
};

// Buffers of one thread, reused for every row.
struct SamplingScratch {
  std::vector<float> maxima, sums;     // [blocks]
  std::vector<float> values, weights;  // [num + LANES] candidates
};

class LogitRow {
 public:
  static constexpr int BLOCK = 128;

  // `logits` [num] must outlive the row.
  LogitRow(const float* logits, int num, SamplingScratch& scratch);

  // False when a logit is NaN, or the greatest one infinite: the row then has no distribution.
  bool is_good() const { return is_good_; }
  int argmax() const;
  int draw(const Filters& filters, uint64_t key);

  // Compute the token's log-probability and rank in softmax(logits), and the num_top likeliest.
  void describe(int token, int num_top, float* logprob, int32_t* rank, int64_t* top_ids,
                float* top_logprobs);

 private:
  const float* block(int index) const;
  bool reaches(int index, float threshold) const { return maxima_[index] / temperature_ >= threshold; }
  vf scaled(const float* from) const { return load<vf>(from) / temperature_; }

  void scale(float temperature);
  vf weights_at(const float* from, float threshold) const;
  double weigh(float threshold);
  int race(float threshold, uint64_t key) const;

  float threshold_of(const Filters& filters);
  float top_k_threshold(int k);
  float top_p_threshold(double top_p, double total, float least);
  void gather(float least);
  double weigh_candidates(bool are_counted);
  double mass_of_candidates(float least) const;
  void drop_candidates_outside(float least, float end);
  float search(double target, double total);
  float search_few(double target, float least);

  const float* logits_;
  const int num_, num_blocks_;
  float* const maxima_;   // [num_blocks] of the logits
  float* const sums_;     // [num_blocks] of the weights, as last weighed
  float* const values_;   // [num_candidates] scaled logits, in the order of ids
  float* const weights_;  // [num_candidates]
  int num_candidates_ = 0;
  float lowest_ = 0;  // candidate that is not -inf
  int best_block_ = 0;
  bool is_good_;
  float best_;             // greatest logit
  float temperature_ = 1;  // by which logits are scaled
  float greatest_;         // scaled logit
  float tail_[BLOCK];      // an incomplete last block, padded with -inf
};

}  // namespace remora
