// Jobs whose chunks take random times, and which notice a chunk that runs twice, early or never.
//
// Compiled together with the team, without the rest of the library.
#include <atomic>
#include <chrono>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "team.h"

namespace {

class UnevenJob : public remora::Job {
 public:
  UnevenJob(const int* num_chunks, int num_stages, unsigned seed)
      : num_chunks_(num_chunks, num_chunks + num_stages), seed_(seed) {
    for (int stage = 0; stage < num_stages; stage++) {
      runs_.emplace_back(num_chunks[stage], 0);
      left_.emplace_back(num_chunks[stage]);
    }
  }
  int num_stages() const override { return (int)num_chunks_.size(); }
  int num_chunks(int stage) const override { return num_chunks_[stage]; }

  void run_chunk(int stage, int chunk, int) override {
    for (int before = 0; before < stage; before++)
      if (left_[before].load(std::memory_order_relaxed) != 0) is_early = true;
    take_time(std::minstd_rand(seed_ + stage * 8191 + chunk));
    runs_[stage][chunk]++;
    left_[stage].fetch_sub(1, std::memory_order_relaxed);
  }

  bool ran_each_chunk_once() const {
    for (const auto& stage : runs_)
      for (int runs : stage)
        if (runs != 1) return false;
    return true;
  }

  std::atomic<bool> is_early{false};

 private:
  // Most chunks are short, some are long, and in some the thread loses its core.
  static void take_time(std::minstd_rand random) {
    random.discard(2);
    switch (random() % 64) {
      case 0: return std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      case 1: return std::this_thread::yield();
      default: break;
    }
    const int turns = random() % 8 == 0 ? random() % 4000 : random() % 50;
    for (int turn = 0; turn < turns; turn++) asm volatile("" ::: "memory");
  }

  const std::vector<int> num_chunks_;
  const unsigned seed_;
  std::deque<std::vector<int>> runs_;
  std::deque<std::atomic<int>> left_;
};

}  // namespace

extern "C" {

void* team_new(int num_threads) { return new remora::Team(num_threads); }
void team_free(void* team) { delete (remora::Team*)team; }

// Returns what went wrong, or null.
const char* run_uneven_job(void* team, const int* num_chunks, int num_stages, unsigned seed) {
  UnevenJob job(num_chunks, num_stages, seed);
  ((remora::Team*)team)->run(job);
  if (job.is_early) return "a chunk ran before the end of an earlier stage";
  return job.ran_each_chunk_once() ? nullptr : "a chunk ran twice or not at all";
}

}  // extern "C"
