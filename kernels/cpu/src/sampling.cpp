// Sampling functions of the library: jobs with one chunk per row.
#include <cmath>

#include "logit_row.h"
#include "team.h"

namespace remora {

namespace {

template <class Function>
class RowJob : public Job {
 public:
  RowJob(int num_rows, Function function) : num_rows_(num_rows), function_(function) {}
  int num_stages() const override { return 1; }
  int num_chunks(int) const override { return num_rows_; }
  void run_chunk(int, int row, int) override {
    thread_local SamplingScratch scratch;
    function_(row, scratch);
  }

 private:
  const int num_rows_;
  const Function function_;
};

// One row takes less time than waking another thread.
template <class Function>
void for_each_row(void* team, int num_rows, Function function) {
  RowJob<Function> job(num_rows, function);
  if (num_rows == 1)
    job.run_chunk(0, 0, 0);
  else
    static_cast<Team*>(team)->run(job);
}

// One word at a time: a constant length lets the compiler vectorise.
void mask_row(float* logits, int vocab_size, const uint32_t* words) {
  const auto addend = [](uint32_t word, int i) { return word >> i & 1 ? 0.0f : -INFINITY; };
  const int num_whole = vocab_size / 32;
  for (int w = 0; w < num_whole; w++) {
    const uint32_t word = words[w];
    if (word == UINT32_MAX) continue;
    for (int i = 0; i < 32; i++) logits[w * 32 + i] += addend(word, i);
  }
  for (int i = num_whole * 32; i < vocab_size; i++)
    logits[i] += addend(words[num_whole], i - num_whole * 32);
}

}  // namespace

}  // namespace remora

// See NativeSampling in kernels/cpu/sampling.py. All arrays except logits are [num_rows]; without
// temperatures every row is greedy and the other parameters are not read.
extern "C" void remora_choose(void* team, const float* logits, int64_t stride, int num_rows,
                              int vocab_size, const float* temperature, const int64_t* keys,
                              const int64_t* top_k, const double* top_p, const float* min_p,
                              int64_t* token_ids, uint8_t* is_good) {
  using namespace remora;
  for_each_row(team, num_rows, [=](int r, SamplingScratch& scratch) {
    LogitRow row(logits + r * stride, vocab_size, scratch);
    is_good[r] = row.is_good();
    const bool draws = temperature && row.is_good() && temperature[r] > 0;
    token_ids[r] = draws ? row.draw({temperature[r], top_k[r], top_p[r], min_p[r]}, (uint64_t)keys[r])
                         : row.argmax();
  });
}

// top_ids and top_logprobs are [num_rows, num_top]; num_top is at most vocab_size.
extern "C" void remora_token_logprobs(void* team, const float* logits, int64_t stride, int num_rows,
                                      int vocab_size, const int64_t* token_ids, int num_top,
                                      float* logprobs, int32_t* ranks, int64_t* top_ids,
                                      float* top_logprobs) {
  using namespace remora;
  for_each_row(team, num_rows, [=](int r, SamplingScratch& scratch) {
    const int64_t top = (int64_t)r * num_top;
    LogitRow(logits + r * stride, vocab_size, scratch)
        .describe((int)token_ids[r], num_top, logprobs + r, ranks + r, top_ids + top,
                  top_logprobs + top);
  });
}

// lines and words are [num_lines] and [num_lines, ceil(vocab_size / 32)].
extern "C" void remora_mask_tokens(void* team, float* logits, int64_t stride, int num_lines,
                                   int vocab_size, const int64_t* lines, const uint32_t* words) {
  using namespace remora;
  const int64_t num_words = (vocab_size + 31) / 32;
  for_each_row(team, num_lines, [=](int g, SamplingScratch&) {
    mask_row(logits + lines[g] * stride, vocab_size, words + g * num_words);
  });
}
