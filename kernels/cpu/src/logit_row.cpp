#include "logit_row.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "logit_math.h"

namespace remora {

namespace {

constexpr int HALF = LANES / 2;
// Threshold search: steps between reductions of the candidates, and candidates that are sorted.
constexpr int ROUNDS_PER_DROP = 2, FEW = 48;

typedef float vf_half __attribute__((vector_size(32)));
typedef int32_t vi_half __attribute__((vector_size(32)));
typedef double vd __attribute__((vector_size(64)));

template <class T>
T* room_for(std::vector<T>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

}  // namespace

LogitRow::LogitRow(const float* logits, int num, SamplingScratch& scratch)
    : logits_(logits),
      num_(num),
      num_blocks_((num + BLOCK - 1) / BLOCK),
      maxima_(room_for(scratch.maxima, num_blocks_)),
      sums_(room_for(scratch.sums, num_blocks_)),
      values_(room_for(scratch.values, num + LANES)),
      weights_(room_for(scratch.weights, num + LANES)) {
  const int whole = num / BLOCK * BLOCK;
  std::fill(std::copy(logits + whole, logits + num, tail_), tail_ + BLOCK, -INFINITY);
  vi is_nan = {};
  best_ = -INFINITY;
  for (int b = 0; b < num_blocks_; b++) {
    const float* x = block(b);
    vf most = splat(-INFINITY);
    UNROLL for (int i = 0; i < BLOCK; i += LANES) {
      const vf value = load<vf>(x + i);
      is_nan |= value != value;
      most = max(most, value);
    }
    maxima_[b] = max_lane(most);
    if (maxima_[b] > best_) {
      best_ = maxima_[b];
      best_block_ = b;
    }
  }
  is_good_ = !any(is_nan) && std::isfinite(best_);
  greatest_ = best_;
}

const float* LogitRow::block(int index) const {
  return (index + 1) * BLOCK <= num_ ? logits_ + (int64_t)index * BLOCK : tail_;
}

int LogitRow::argmax() const {
  const float* x = block(best_block_);
  const int end = std::min(BLOCK, num_ - best_block_ * BLOCK);
  int at = 0;
  while (at < end - 1 && x[at] != best_) at++;
  return best_block_ * BLOCK + at;
}

int LogitRow::draw(const Filters& filters, uint64_t key) {
  scale(filters.temperature);
  return race(threshold_of(filters), key);
}

void LogitRow::scale(float temperature) {
  temperature_ = temperature;
  greatest_ = best_ / temperature;
}

// -- weights: exp(scaled logit - greatest), 0 below a threshold -----------------------------------

INLINE vf LogitRow::weights_at(const float* from, float threshold) const {
  const vf x = scaled(from);
  return bits_to_float(float_to_bits(exp_negative(x - greatest_)) & (x >= threshold));
}

// Sum the weights of each block into `sums_`; returns the sum of all.
double LogitRow::weigh(float threshold) {
  double total = 0;
  for (int b = 0; b < num_blocks_; b++) {
    vf weight = {};
    if (reaches(b, threshold)) {
      const float* x = block(b);
      UNROLL for (int i = 0; i < BLOCK; i += LANES) weight += weights_at(x + i, threshold);
    }
    sums_[b] = sum(weight);
    total += sums_[b];
  }
  return total;
}

// Find the token whose exponential number, divided by its weight, is least. -log(1 - f) is at least
// f, so most blocks lose by their greatest weight, and most other tokens without a logarithm. The
// lowest id wins among equals.
int LogitRow::race(float threshold, uint64_t key) const {
  float least = INFINITY;
  int chosen = argmax();
  const auto run_block = [&](int b, float greatest_weight) {
    vf fractions[BLOCK / LANES];
    vi may_win = {};
    UNROLL for (int i = 0; i < BLOCK / LANES; i++) {
      fractions[i] = random_fractions(key, b * BLOCK + i * LANES);
      may_win |= fractions[i] < least * greatest_weight;
    }
    if (!any(may_win)) return;
    for (int i = 0; i < BLOCK / LANES; i++) {
      const vf weight = weights_at(block(b) + i * LANES, threshold);
      if (!any(fractions[i] < least * weight)) continue;
      for (int lane = 0; lane < LANES; lane++) {
        if (!(weight[lane] > 0)) continue;
        const float time = (float)-std::log1p(-(double)fractions[i][lane]) / weight[lane];
        const int id = b * BLOCK + i * LANES + lane;
        if (time < least || (time == least && id < chosen)) {
          least = time;
          chosen = id;
        }
      }
    }
  };
  run_block(best_block_, 1);  // first, because its time is hard to beat
  for (int b = 0; b < num_blocks_; b++) {
    if (b == best_block_ || !reaches(b, threshold)) continue;
    const vf most = exp_negative(splat(maxima_[b] / temperature_ - greatest_));
    run_block(b, most[0] * 1.000001f);  // of its weights; the margin exceeds their rounding
  }
  return chosen;
}

// -- thresholds -----------------------------------------------------------------------------------

float LogitRow::threshold_of(const Filters& filters) {
  const float least = filters.min_p > 0 ? greatest_ + (float)std::log((double)filters.min_p) : -INFINITY;
  if (filters.top_k > 0 && filters.top_k < num_) {
    float threshold = top_k_threshold((int)filters.top_k);
    if (filters.top_p < 1) {
      gather(threshold);
      const double total = weigh_candidates(false);
      threshold = std::max(threshold, search(filters.top_p * total, total));
    }
    return std::max(least, threshold);
  }
  if (filters.top_p < 1) return top_p_threshold(filters.top_p, weigh(-INFINITY), least);
  return least;
}

// The k-th greatest scaled logit. It is at least the k-th greatest block maximum.
float LogitRow::top_k_threshold(int k) {
  float least = -INFINITY;
  if (k <= num_blocks_) {
    float* maxima = values_;
    std::copy(maxima_, maxima_ + num_blocks_, maxima);
    std::nth_element(maxima, maxima + k - 1, maxima + num_blocks_, std::greater<float>());
    least = maxima[k - 1] / temperature_;
  }
  gather(least);
  return search(k, weigh_candidates(true));
}

// The threshold of top-p, or `least` if that is greater. Tokens with weights so small that the
// whole vocabulary could not make up half of the cut mass are no candidates.
float LogitRow::top_p_threshold(double top_p, double total, float least) {
  const float negligible = greatest_ + (float)std::log(0.5 * (1 - top_p) * total / num_);
  const float bound = std::max(least, negligible);
  gather(bound);
  return std::max(least, search(top_p * total, weigh_candidates(false)));
}

// -- candidates: scaled logits at or above a value ---------------------------------------------

void LogitRow::gather(float least) {
  int count = 0;
  vf lowest = splat(greatest_);
  for (int b = 0; b < num_blocks_; b++) {
    if (!reaches(b, least)) continue;
    const float* from = block(b);
    // Exclude the padding of the last block.
    const int end = std::min(BLOCK, num_ - b * BLOCK);
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < end; i += LANES) {
      const vf x = scaled(from + i);
      const vi keep = (x >= least) & (lane < end - i);
      count += append(values_ + count, x, keep);
      lowest = keep & (x > -INFINITY) ? min(lowest, x) : lowest;
    }
  }
  num_candidates_ = count;
  lowest_ = -max_lane(-lowest);
}

// With `are_counted` every weight is 1. Returns the sum.
double LogitRow::weigh_candidates(bool are_counted) {
  store(values_ + num_candidates_, splat(-INFINITY));
  for (int i = 0; i < num_candidates_; i += LANES)
    store(weights_ + i, are_counted ? splat(1.0f) : exp_negative(load<vf>(values_ + i) - greatest_));
  store(weights_ + num_candidates_, vf{});
  return mass_of_candidates(-INFINITY);
}

double LogitRow::mass_of_candidates(float least) const {
  vd low = {}, high = {};
  for (int i = 0; i < num_candidates_; i += LANES) {
    const auto part = [&](int at) {
      const vi_half keep = load<vf_half>(values_ + at) >= least;
      return __builtin_convertvector((vf_half)(load<vi_half>(weights_ + at) & keep), vd);
    };
    low += part(i);
    high += part(i + HALF);
  }
  low += high;
  double mass = 0;
  for (int lane = 0; lane < HALF; lane++) mass += low[lane];
  return mass;
}

void LogitRow::drop_candidates_outside(float least, float end) {
  int count = 0;
  for (int i = 0; i < num_candidates_; i += LANES) {
    const vf value = load<vf>(values_ + i), weight = load<vf>(weights_ + i);
    // Padding has no weight, and candidates without weight do not affect the search.
    const vi keep = (value >= least) & (value < end) & (weight > 0.0f);
    append(values_ + count, value, keep);
    count += append(weights_ + count, weight, keep);
  }
  num_candidates_ = count;
  store(values_ + count, splat(-INFINITY));
  store(weights_ + count, vf{});
}

// The greatest value such that candidates at or above it weigh at least `target`; -inf if there is
// none. `total`: sum of all weights. Halves the range of values until few candidates remain.
float LogitRow::search(double target, double total) {
  if (total < target) return -INFINITY;
  float reaching = lowest_, short_of = std::nextafter(greatest_, INFINITY);
  double dropped = 0, above = 0;  // weights of the candidates dropped, and from short_of up
  for (int round = 1;; round++) {
    const float middle = 0.5f * reaching + 0.5f * short_of;
    if (middle <= reaching || middle >= short_of) return reaching;
    const double mass = dropped + mass_of_candidates(middle);
    if (mass >= target) {
      reaching = middle;
    } else {
      short_of = middle;
      above = mass;
    }
    if (round % ROUNDS_PER_DROP == 0) {
      drop_candidates_outside(reaching, short_of);
      dropped = above;
      if (num_candidates_ <= FEW) return search_few(target - dropped, reaching);
    }
  }
}

float LogitRow::search_few(double target, float least) {
  std::pair<float, float> falling[FEW];
  for (int i = 0; i < num_candidates_; i++) falling[i] = {-values_[i], weights_[i]};
  std::sort(falling, falling + num_candidates_);
  double mass = 0;
  for (int i = 0; i < num_candidates_; i++) {
    mass += falling[i].second;
    if (mass >= target) return -falling[i].first;
  }
  return least;
}

// -- log-probabilities ----------------------------------------------------------------------------

void LogitRow::describe(int token, int num_top, float* logprob, int32_t* rank, int64_t* top_ids,
                        float* top_logprobs) {
  scale(1);
  const double total = is_good_ ? std::log(weigh(-INFINITY)) : NAN;
  const float own = logits_[token];
  *logprob = (float)((double)own - best_ - total);
  *rank = 1;
  for (int b = 0; b < num_blocks_; b++) {
    if (!(maxima_[b] > own)) continue;
    vi likelier = {};
    for (int i = 0; i < BLOCK; i += LANES) likelier -= load<vf>(block(b) + i) > own;
    for (int lane = 0; lane < LANES; lane++) *rank += likelier[lane];
  }
  if (num_top == 0) return;
  const float last = is_good_ && num_top < num_ ? top_k_threshold(num_top) : -INFINITY;
  std::vector<std::pair<float, int>> above;
  std::vector<int> equal;
  for (int b = 0; b < num_blocks_; b++) {
    if (is_good_ && maxima_[b] < last) continue;
    const int end = std::min(num_, (b + 1) * BLOCK);
    for (int id = b * BLOCK; id < end; id++) {
      if (is_good_ && logits_[id] > last) above.push_back({-logits_[id], id});
      else if ((!is_good_ || logits_[id] == last) && (int)equal.size() < num_top) equal.push_back(id);
    }
  }
  std::sort(above.begin(), above.end());
  for (int i = 0; i < num_top; i++) {
    top_ids[i] = i < (int)above.size() ? above[i].second : equal[i - above.size()];
    top_logprobs[i] = (float)((double)logits_[top_ids[i]] - best_ - total);
  }
}

}  // namespace remora
