#include "team.h"

#include <chrono>

namespace remora {

namespace {

constexpr int CHUNK_BITS = 24;
constexpr int SPINS = 4000;  // 50 to 200 us: longer than a hand-over, shorter than a scheduler tick

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int count_of(uint64_t word, uint64_t epoch) {
  return (word >> CHUNK_BITS) == epoch ? (int)(word & ((1u << CHUNK_BITS) - 1)) : 0;
}

// First chunk of the share of thread `owner`; the first shares may be larger by one.
inline int share_start(int num_chunks, int owner, int num_threads) {
  const int rest = num_chunks % num_threads;
  return num_chunks / num_threads * owner + (owner < rest ? owner : rest);
}

}  // namespace

Team::Team(int num_threads)
    : num_threads_(num_threads),
      claimed_(new Counter[(size_t)MAX_STAGES * num_threads]),
      done_(new Counter[MAX_STAGES]),
      num_chunks_(new std::atomic<int>[MAX_STAGES]) {
  try {
    for (int thread = 1; thread < num_threads; thread++)
      threads_.emplace_back([this, thread] { stand_by(thread); });
  } catch (...) {
    close();
    throw;
  }
}

Team::~Team() { close(); }

void Team::close() {
  closing_ = true;
  doorbell_++;
  doorbell_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(Job& job) {
  const int num_stages = job.num_stages();
  for (int stage = 0; stage < num_stages; stage++)
    num_chunks_[stage].store(job.num_chunks(stage), std::memory_order_relaxed);
  num_stages_.store(num_stages, std::memory_order_relaxed);
  job_.store(&job, std::memory_order_relaxed);
  epoch_.store(++last_epoch_);
  if (num_threads_ > 1) {
    doorbell_++;
    doorbell_.notify_all();
  }
  take_part(last_epoch_, 0);
  epoch_.store(0);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void Team::stand_by(int thread) {
  int seen = 0;
  while (!closing_) {
    const int rung = doorbell_.load();
    if (rung == seen) {
      doorbell_.wait(seen);
      continue;
    }
    seen = rung;
    const uint64_t epoch = epoch_.load();
    if (epoch != 0) take_part(epoch, thread);
  }
}

void Team::take_part(uint64_t epoch, int thread) {
  for (int at = 0;; at++) {
    const int num_stages = num_stages_.load(std::memory_order_relaxed);
    if (at == num_stages) return;
    const int num_chunks = num_chunks_[at].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (epoch_.load() != epoch) return;
    const int finished = run_chunks(at, num_chunks, epoch, thread);
    if (finished > 0) add(done_[at], epoch, finished);
    if (!wait_for(done_[at], epoch, num_chunks)) return;
  }
}

// Run chunks of the thread's own share, then of others; return their number.
int Team::run_chunks(int stage, int num_chunks, uint64_t epoch, int thread) {
  int finished = 0;
  for (int other = 0; other < num_threads_; other++) {
    const int owner = (thread + other) % num_threads_;
    const int first = share_start(num_chunks, owner, num_threads_);
    const int size = share_start(num_chunks, owner + 1, num_threads_) - first;
    Counter& claimed = claimed_[(size_t)stage * num_threads_ + owner];
    for (int chunk; claim(claimed, epoch, size, &chunk); finished++)
      job_.load(std::memory_order_relaxed)->run_chunk(stage, first + chunk, thread);
  }
  return finished;
}

bool Team::claim(Counter& claimed, uint64_t epoch, int limit, int* chunk) {
  uint64_t word = claimed.word.load();
  for (;;) {
    if ((word >> CHUNK_BITS) > epoch) return false;
    const int count = count_of(word, epoch);
    if (count >= limit) return false;
    if (claimed.word.compare_exchange_weak(word, epoch << CHUNK_BITS | (uint64_t)(count + 1))) {
      *chunk = count;
      return true;
    }
  }
}

void Team::add(Counter& done, uint64_t epoch, int count) {
  uint64_t word = done.word.load();
  while (!done.word.compare_exchange_weak(
      word, epoch << CHUNK_BITS | (uint64_t)(count_of(word, epoch) + count))) {
  }
}

// Returns false if the job has ended. A thread that waits for a preempted peer yields its core after
// a while, so that the system can move the peer there.
bool Team::wait_for(Counter& done, uint64_t epoch, int num_chunks) {
  for (int spins = 0; count_of(done.word.load(), epoch) < num_chunks; spins++) {
    if (epoch_.load() != epoch) return false;
    if (spins < SPINS)
      pause();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

}  // namespace remora
