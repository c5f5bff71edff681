// A persistent team of threads that runs a list of parallel loops with one wake-up.
//
// A job is a sequence of stages; a stage is a number of chunks that may run in any order and
// concurrently, and begins when every chunk of the previous stage has ended. Each thread starts with
// its share of the chunks, the same part of every stage, so that it reads data that it has written;
// when its share is done it takes chunks of other threads. Chunks are claimed one by one, so a
// preempted thread delays only its current chunk, and late threads join at the current stage.
//
// Knows nothing of what a chunk computes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace remora {

class Job {
 public:
  virtual ~Job() = default;
  virtual int num_stages() const = 0;
  virtual int num_chunks(int stage) const = 0;
  virtual void run_chunk(int stage, int chunk, int thread) = 0;
};

class Team {
 public:
  static constexpr int MAX_STAGES = 1024;

  explicit Team(int num_threads);
  ~Team();

  // Run the job to its end; the caller is thread 0. One caller at a time.
  void run(Job& job);

  int num_threads() const { return num_threads_; }

 private:
  // epoch << CHUNK_BITS | count: a count of another epoch stands for 0.
  struct alignas(128) Counter {
    std::atomic<uint64_t> word{0};
  };

  void close();
  void stand_by(int thread);
  void take_part(uint64_t epoch, int thread);
  int run_chunks(int stage, int num_chunks, uint64_t epoch, int thread);
  bool claim(Counter& claimed, uint64_t epoch, int limit, int* chunk);
  void add(Counter& done, uint64_t epoch, int count);
  bool wait_for(Counter& done, uint64_t epoch, int num_chunks);

  const int num_threads_;
  std::unique_ptr<Counter[]> claimed_;  // [MAX_STAGES][num_threads], of each thread's share
  std::unique_ptr<Counter[]> done_;     // [MAX_STAGES]
  // The running job. Written while `epoch_` is 0 (nothing runs), so a thread that reads these and
  // then still finds its epoch has read values of that epoch.
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> num_stages_{0};
  std::unique_ptr<std::atomic<int>[]> num_chunks_;
  uint64_t last_epoch_ = 0;
  alignas(128) std::atomic<uint64_t> epoch_{0};
  alignas(128) std::atomic<int> doorbell_{0};  // changes with every job; sleeping threads wait on it
  std::atomic<bool> closing_{false};
  std::vector<std::thread> threads_;
};

}  // namespace remora
