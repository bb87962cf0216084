// Waiting for other processes: pause, then yield, then sleep, with an eye on the clock, the peer's
// life and the group's abort word.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "shm/layout.h"

namespace mcp::shm {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Where another rank may come in between: a test that defines MCP_SHM_POINTS dawdles there at
// random.
#ifdef MCP_SHM_POINTS
void protocol_point();
#else
inline void protocol_point() {}
#endif

// How long to try before the next, costlier way of waiting.
struct Patience {
  int pauses;  // tries with the core kept
  int yields;  // tries with the core offered to others
};

// A pause takes 40 to 140 cycles, so 100 of them a few us: what ranks that run side by side need
// from each other takes no longer. Longer spins were measured: they gain nothing where each rank
// has a core, and double a call of 256 KiB where the scheduler has put two ranks on one. Where
// ranks outnumber the cores for sure, the peer needs this one almost at once.
Patience choose_patience(int ranks, int cores);

// Seconds that the calling thread has spent in waits longer than `pauses`, in any group.
double waited_s();

// Ends a wait by throwing; called every few milliseconds of one.
using Check = std::function<void()>;

class Waiter {
 public:
  Waiter(Doorbell* own, Patience patience) : own_(own), patience_(patience) {}

  // Returns when `ready()`; `check` throws when it never will be.
  template <class Ready>
  void wait(const Ready& ready, const Check& check) {
    for (int i = 0; i < patience_.pauses; ++i) {
      if (ready()) return;
      pause_cpu();
    }
    if (!ready()) wait_long(ready, check);
  }

 private:
  void wait_long(const std::function<bool()>& ready, const Check& check);

  Doorbell* own_;
  Patience patience_;
};

// Stands between the stores that make a sleeper's condition true and the rings that wake it: else
// both sides could miss each other, and one sleep for a slice.
inline void fence_before_ring() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Wakes whoever sleeps at `bell`; costs one load where nobody does.
void ring(Doorbell* bell);

}  // namespace mcp::shm
