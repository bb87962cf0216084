// What the parts of an attention call share: memory, threads, sizes. No torch here.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "common/red_zone.h"
#include "cpu/flash_attn_run.h"

namespace mcp {

// Multiply-adds below which waking a thread costs more than it brings: ~20 us of work.
constexpr int64_t kSerialWork = 1 << 20;

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = 2 << 20;

// Memory on cache lines, not initialised. Where it is large the system is asked for huge pages:
// thousands of page faults would take several percent of a call.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : align_(bytes >= 2 * kHugePage ? kHugePage : kCacheLine), bytes_(bytes) {
    const size_t size = static_cast<size_t>(attn_round_up(std::max<int64_t>(bytes, 1), align_));
    data_ = static_cast<char*>(::operator new(size, std::align_val_t(align_)));
    forbid(data_ + bytes, size - bytes);
#if defined(__linux__)
    if (align_ == kHugePage) madvise(data_, size, MADV_HUGEPAGE);  // a wish: it may be refused
#endif
  }
  ~Memory() { ::operator delete(data_, std::align_val_t(align_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* at(int64_t byte) const { return data_ + byte; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t align_, bytes_;
  char* data_;
};

// What a thread may keep from call to call: scratch of a decoding step on a dozen threads. Nothing
// where a sanitizer looks at the ends of memory, which are then those of the call at hand.
constexpr int64_t kKeptBytes = kRedZone > 0 ? 0 : 1 << 20;

// Memory of which a thread keeps the last piece for its next call, up to kKeptBytes: a step of
// decoding is too short to wait for fresh pages, whatever the allocator gave back to the system.
class KeptMemory {
 public:
  explicit KeptMemory(int64_t bytes) {
    if (bytes <= kKeptBytes) memory_ = std::move(kept());
    if (memory_ == nullptr || memory_->bytes() < bytes) memory_ = std::make_unique<Memory>(bytes);
  }
  ~KeptMemory() {
    if (memory_->bytes() <= kKeptBytes) kept() = std::move(memory_);
  }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  char* at(int64_t byte) const { return memory_->at(byte); }

 private:
  static std::unique_ptr<Memory>& kept() {
    static thread_local std::unique_ptr<Memory> memory;
    return memory;
  }
  std::unique_ptr<Memory> memory_;
};

inline int64_t scalar_bytes(const FlashAttnArgs& args) {
  return args.type == AttnType::kFloat64 ? sizeof(double) : sizeof(float);
}

struct Work {
  const FlashAttnArgs& args;
  const FlashAttnBody& body;
  const FlashAttnThreads& threads;
  int64_t num_threads;

  // Calls task(i, worker) once for each i in [0, count); threads take the next one when they are
  // done with theirs.
  template <class Task>
  void share(int64_t count, const Task& task) const {
    const int64_t workers = std::min(num_threads, count);
    if (workers <= 1) {
      for (int64_t i = 0; i < count; ++i) task(i, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    threads.parallel_for(workers, [&](int64_t worker) {
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i, worker);
    });
  }
};

// Bytes of an array of scalars, rounded up so that the next one begins on a cache line too.
inline int64_t array_bytes(const FlashAttnArgs& args, int64_t scalars) {
  return attn_round_up(scalars * scalar_bytes(args), kCacheLine);
}

// An array at the beginning of `memory`, which others follow; null only measures. Bytes taken.
inline int64_t place_array(const FlashAttnArgs& args, char* memory, int64_t scalars, void*& array) {
  const int64_t used = scalars * scalar_bytes(args);
  const int64_t taken = array_bytes(args, scalars) + static_cast<int64_t>(kRedZone);
  if (memory != nullptr) {
    array = memory;
    allow(memory, used);
    forbid(memory + used, taken - used);
  }
  return taken;
}

inline int64_t group_of(const FlashAttnArgs& args) { return args.heads / args.kv_heads; }

// One thread where the call is small.
inline Work plan_work(const FlashAttnArgs& args, const FlashAttnBody& body,
                      const FlashAttnThreads& threads) {
  double products = 0;
  for (int64_t b = 0; b < args.num_sequences; ++b) {
    products += static_cast<double>(args.sequences[b].num_rows) *
                static_cast<double>(args.sequences[b].num_keys);
  }
  products *= static_cast<double>(args.heads * (args.head_dim + args.value_dim));
  return {args, body, threads, products < kSerialWork ? 1 : threads.count};
}

}  // namespace mcp
