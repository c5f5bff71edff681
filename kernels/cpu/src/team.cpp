#include "team.h"

#include <algorithm>
#include <bit>
#include <chrono>

namespace remora {

namespace {

constexpr int SPINS = 4000;  // 50 to 200 us: longer than a hand-over, shorter than a scheduler tick

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int num_threads)
    : num_threads_(num_threads),
      num_groups_((num_threads + GROUP - 1) / GROUP),
      claimed_(new Counter[NUM_SLOTS * num_threads]),
      finished_(new Counter[NUM_SLOTS * num_groups_]),
      ended_(new Counter[num_groups_]),
      firsts_(new std::atomic<uint64_t>[MAX_STAGES + 1]) {
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
  firsts_[0].store(num_chunks_, std::memory_order_relaxed);
  for (int stage = 0; stage < num_stages; stage++) {
    num_chunks_ += job.num_chunks(stage);
    firsts_[stage + 1].store(num_chunks_, std::memory_order_relaxed);
  }
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
    if (at >= num_stages_.load(std::memory_order_relaxed)) return;
    const Stage stage{at, firsts_[at].load(std::memory_order_relaxed),
                      firsts_[at + 1].load(std::memory_order_relaxed)};
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (epoch_.load() != epoch) return;
    run_chunks(stage, thread);
    if (!wait_for(stage, epoch, thread)) return;
  }
}

// Run chunks of the shares of the thread's own group, then of other groups, neighbours first.
void Team::run_chunks(const Stage& stage, int thread) {
  const int own = thread / GROUP, distances = (int)std::bit_ceil((unsigned)num_groups_);
  for (int distance = 0; distance < distances && !has_ended(stage, thread); distance++) {
    const int group = own ^ distance;
    if (group >= num_groups_) continue;
    int count = 0;
    for (int other = 0; other < GROUP; other++) {
      const int owner = group * GROUP + (thread % GROUP ^ other);
      if (owner < num_threads_) count += run_share(stage, owner, thread);
    }
    if (count > 0) report(stage, group, count);
  }
}

// Claim and run chunks of one share until there are none; return their number.
int Team::run_share(const Stage& stage, int owner, int thread) {
  const int start = share_start(stage, owner), size = share_start(stage, owner + 1) - start;
  if (size == 0) return 0;
  std::atomic<uint64_t>& claimed = claimed_[slot_of(stage) * num_threads_ + owner].value;
  uint64_t value = claimed.load();
  for (int count = 0;;) {
    const uint64_t next = std::max(value, stage.first);
    if (next >= stage.first + size) return count;
    if (!claimed.compare_exchange_weak(value, next + 1)) continue;
    const int chunk = start + (int)(next - stage.first);
    job_.load(std::memory_order_relaxed)->run_chunk(stage.number, chunk, thread);
    count++;
    value = claimed.load();
  }
}

// First chunk of a thread's share, counted within the stage; the first shares may be larger by one.
int Team::share_start(const Stage& stage, int thread) const {
  const int rest = stage.num_chunks() % num_threads_;
  return stage.num_chunks() / num_threads_ * thread + std::min(thread, rest);
}

// Count ended chunks of a group's shares. The last report of the last group ends the stage.
void Team::report(const Stage& stage, int group, int count) {
  const int end = std::min((group + 1) * GROUP, num_threads_);
  const int size = share_start(stage, end) - share_start(stage, group * GROUP);
  Counter& finished = finished_[slot_of(stage) * num_groups_ + group];
  if (finished.add(stage.first, count) < size || num_groups_ == 1) return;
  const int num_owners = std::min(stage.num_chunks(), num_threads_);
  if (complete_.add(stage.first, 1) < (num_owners + GROUP - 1) / GROUP) return;
  for (int each = 0; each < num_groups_; each++) ended_[each].raise(stage.last);
}

bool Team::has_ended(const Stage& stage, int thread) const {
  if (stage.first == stage.last) return true;
  const Counter& ended = num_groups_ == 1 ? finished_[slot_of(stage)] : ended_[thread / GROUP];
  return ended.value.load() >= stage.last;
}

// Returns false if the job has ended. A thread that waits for a preempted peer yields its core after
// a while, so that the system can move the peer there.
bool Team::wait_for(const Stage& stage, uint64_t epoch, int thread) {
  for (int spins = 0; !has_ended(stage, thread); spins++) {
    if (epoch_.load() != epoch) return false;
    if (spins < SPINS)
      pause();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

// Returns the new count above `first`.
int Team::Counter::add(uint64_t first, int count) {
  uint64_t old = value.load(), sum;
  do sum = std::max(old, first) + count;
  while (!value.compare_exchange_weak(old, sum));
  return (int)(sum - first);
}

void Team::Counter::raise(uint64_t least) {
  uint64_t old = value.load();
  while (old < least && !value.compare_exchange_weak(old, least)) {
  }
}

}  // namespace remora
