#include "shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace mcp::shm {
namespace {

// A sleep is cut so often to look at the clock, at signals and at the peer: a rank that dies is
// noticed within one slice.
constexpr long kSliceNs = 50'000'000;
// Looking costs about 10 us, so not at every yield.
constexpr int kYieldsPerCheck = 64;

// Counts itself on every way out, `ready` and `check` may throw.
class Sleeper {
 public:
  explicit Sleeper(Doorbell* bell) : bell_(bell) { bell_->sleepers.fetch_add(1); }
  ~Sleeper() { bell_->sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Doorbell* bell_;
};

thread_local int64_t waited_ns = 0;

// Counts time on every way out.
class Stopwatch {
 public:
  Stopwatch() : start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    const auto elapsed = std::chrono::steady_clock::now() - start_;
    waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  std::chrono::steady_clock::time_point start_;
};

void sleep_at(std::atomic<uint32_t>* word, uint32_t seen) {
  const timespec slice{0, kSliceNs};
  // Not FUTEX_PRIVATE: the processes share the page, not the address. Spurious returns are fine.
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, nullptr, 0);
}

}  // namespace

Patience choose_patience(int ranks, int cores) {
  return ranks <= cores ? Patience{100, 500} : Patience{20, 50};
}

double waited_s() { return static_cast<double>(waited_ns) * 1e-9; }

void Waiter::wait_long(const std::function<bool()>& ready, const Check& check) {
  const Stopwatch watch;
  for (int i = 1; i <= patience_.yields; ++i) {
    ::sched_yield();
    if (ready()) return;
    if (i % kYieldsPerCheck == 0) check();
  }
  const Sleeper sleeper(own_);
  for (;;) {
    const uint32_t seen = own_->rings.load();
    if (ready()) return;  // what was stored before anyone saw a sleeper shows here
    sleep_at(&own_->rings, seen);
    if (ready()) return;
    check();
  }
}

void ring(Doorbell* bell) {
  if (bell->sleepers.load(std::memory_order_relaxed) == 0) return;
  bell->rings.fetch_add(1);
  ::syscall(SYS_futex, &bell->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace mcp::shm
