// What lies where in a rank's segment. Each rank has one; all ranks of a group map all of them.
//
//   Header | outgoing[W] | consumed[W] | slot 0 | slot 1 | ring to rank 0 | ring to rank 1 | ...
//
// A cache line has one writer, so that no rank waits for a line that another one keeps changing;
// the doorbell is the exception, touched only when somebody sleeps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/red_zone.h"
#include "shm/process.h"

namespace mcp::shm {

constexpr size_t kLine = 64;  // bytes of a cache line
constexpr uint64_t kMagic = 0x316d68732d70636dULL;
constexpr uint32_t kLayoutVersion = 1;  // grows when anything here changes meaning
constexpr int kSlots = 2;
constexpr size_t kAbortText = 448;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

// Which call a rank is in; equal on all ranks or they have diverged.
struct Signature {
  uint64_t kind = 0;   // op | dtype << 8 | reduction << 16 | root << 32
  uint64_t bytes = 0;  // of the call, not of the step

  bool operator==(const Signature& other) const {
    return kind == other.kind && bytes == other.bytes;
  }
  bool operator!=(const Signature& other) const { return !(*this == other); }
};

// Written by the owner alone. A step's signature stands until every peer has read it: it is
// overwritten two steps later, which the owner enters only after all peers posted the step between.
struct alignas(kLine) Progress {
  std::atomic<uint64_t> posted{0};  // the last step whose data stand in its slot; never reset
  Signature signature[kSlots];
};

// Where the owner sleeps. A peer rings after a store that the owner may wait for.
struct alignas(kLine) Doorbell {
  std::atomic<uint32_t> rings{0};  // the futex
  std::atomic<uint32_t> sleepers{0};
};

struct alignas(kLine) Abort {
  std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 `text` can be read
  char text[kAbortText];
};

struct alignas(kLine) Counter {
  std::atomic<uint64_t> value{0};
};

struct alignas(kLine) Header {
  uint64_t magic = kMagic;
  uint32_t version = kLayoutVersion;
  int32_t rank = 0;
  int32_t world = 0;
  uint64_t slot_bytes = 0;
  uint64_t ring_bytes = 0;
  Process process;
  Counter mapped;  // peers that have mapped this segment
  Progress progress;
  Doorbell doorbell;
  Abort abort;
};

// Places within a segment, in bytes from its start.
struct Layout {
  int world;
  size_t slot_bytes;
  size_t ring_bytes;

  static constexpr size_t kPage = 4096;

  size_t outgoing(int peer) const { return sizeof(Header) + sizeof(Counter) * peer; }
  size_t consumed(int peer) const { return outgoing(world) + sizeof(Counter) * peer; }
  size_t slot(int parity) const {
    return (consumed(world) + kPage - 1) / kPage * kPage + (slot_bytes + kRedZone) * parity;
  }
  size_t ring(int peer) const { return slot(kSlots) + (ring_bytes + kRedZone) * peer; }
  size_t total() const { return ring(world); }

  // Forbids what lies between the slots and rings of the segment at `base`, in this process.
  void forbid_gaps(const char* base) const {
    for (int parity = 0; parity < kSlots; ++parity)
      forbid(base + slot(parity) + slot_bytes, kRedZone);
    for (int peer = 0; peer < world; ++peer) forbid(base + ring(peer) + ring_bytes, kRedZone);
  }
};

}  // namespace mcp::shm
