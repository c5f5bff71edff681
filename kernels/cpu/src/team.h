// A persistent team of threads that runs a list of parallel loops with one wake-up.
//
// A job is a sequence of stages; a stage is a number of chunks that may run in any order and
// concurrently, and begins when every chunk of the previous stage has ended. Each thread starts with
// its share of the chunks, the same part of every stage, so that it reads data that it has written;
// when its share is done it takes chunks of other threads. Chunks are claimed one by one, so a
// preempted thread delays only its current chunk, and late threads join at the current stage.
//
// Threads form groups of neighbours. Ended chunks are counted for the shares of each group, and
// complete groups for the team, so that no cache line is written by all threads of a large team.
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
  static constexpr int GROUP = 8;  // threads

  explicit Team(int num_threads);
  ~Team();

  // Run the job to its end; the caller is thread 0. One caller at a time.
  void run(Job& job);

  int num_threads() const { return num_threads_; }

 private:
  // Chunks [first, last) are numbered over all stages that the team has run.
  struct Stage {
    int number;  // in its job
    uint64_t first, last;
    int num_chunks() const { return (int)(last - first); }
  };

  // Counts upwards from the `first` of the current stage. A smaller value was left by an earlier
  // stage and stands for `first`; values never fall, so a thread may be late by any number of stages.
  struct alignas(128) Counter {
    std::atomic<uint64_t> value{0};
    int add(uint64_t first, int count);
    void raise(uint64_t least);
  };

  // Consecutive stages count in different slots, so that threads which still read the counters of one
  // stage do not slow down writes to the counters of the next.
  static constexpr int NUM_SLOTS = 4;

  void close();
  void stand_by(int thread);
  void take_part(uint64_t epoch, int thread);
  void run_chunks(const Stage& stage, int thread);
  int run_share(const Stage& stage, int owner, int thread);
  void report(const Stage& stage, int group, int count);
  bool has_ended(const Stage& stage, int thread) const;
  bool wait_for(const Stage& stage, uint64_t epoch, int thread);
  int share_start(const Stage& stage, int thread) const;
  size_t slot_of(const Stage& stage) const { return stage.number % NUM_SLOTS; }

  const int num_threads_, num_groups_;
  std::unique_ptr<Counter[]> claimed_;   // [NUM_SLOTS][num_threads] claimed chunks of each share
  std::unique_ptr<Counter[]> finished_;  // [NUM_SLOTS][num_groups] ended chunks of a group's shares
  Counter complete_;                     // groups whose shares have ended
  // [num_groups] `last` of the latest stage that has ended, for the group's waiting threads to read. A
  // team of one group reads `finished_` instead.
  std::unique_ptr<Counter[]> ended_;
  // The running job. Written while `epoch_` is 0 (nothing runs), so a thread that reads these and
  // then still finds its epoch has read values of that epoch.
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> num_stages_{0};
  std::unique_ptr<std::atomic<uint64_t>[]> firsts_;  // [MAX_STAGES + 1] of each stage; the job's last
  uint64_t last_epoch_ = 0, num_chunks_ = 0;         // of all jobs
  alignas(128) std::atomic<uint64_t> epoch_{0};
  alignas(128) std::atomic<int> doorbell_{0};  // changes with every job; sleeping threads wait on it
  std::atomic<bool> closing_{false};
  std::vector<std::thread> threads_;
};

}  // namespace remora
