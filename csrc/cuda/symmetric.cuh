// The protocol of kernels that talk to the same kernel on other GPUs through symmetric memory.
//
// Each rank has a buffer of equal layout, and every rank maps all of them:
//
//   epoch   calls of this channel that this rank has finished; counted on the device, never reset
//   ticket  blocks of the running call that are done
//   dead    set by the first timeout: what runs later returns at once
//   flags   [2 parities][phases][blocks][world], one writer each; a rank writes its own into the
//           buffers of its peers, and waits on those in its own
//   slots   2 x slot_bytes, what peers read
//
// A call takes epoch + 1 and the flags and the slot of its parity. Two of each are enough: a rank
// starts call e + 2 after its call e + 1, which waited for a flag that every peer posts in call
// e + 1, which a peer starts after its call e. So nobody reads or waits on parity e any more. It
// follows that every call waits for every peer at least once.
//
// A flag is stored with release and loaded with acquire, both at system scope. Epochs are read from
// memory, so that a CUDA graph replays; they have 64 bits and do not wrap.
//
// A block waits only for blocks of its own number on other ranks. A launch has at most as many
// blocks as the smallest GPU of the group holds at once, so what is waited for is running.
//
// A wait that outlasts timeout_ns writes the error word (host memory, for the host to raise), sets
// dead, and the block fills what it would have written with NaN.
//
// Includes no CUDA header: the file that includes it brings the words (words.cuh for a GPU).
#pragma once

#include <cstdint>

namespace mcp::cuda {

constexpr int kMaxBlocks = 32;  // enough to saturate NVLink by 16-byte loads; few enough to fit
constexpr int kPhases = 2;      // published, reduced
constexpr int64_t kEpochAt = 0, kTicketAt = 128, kDeadAt = 256, kFlagsAt = 512;  // a line each
constexpr int64_t kSlotAlign = 4096;

__host__ __device__ constexpr int64_t slots_at(int world) {
  const int64_t flag_bytes = int64_t{2} * kPhases * kMaxBlocks * world * 8;
  return (kFlagsAt + flag_bytes + kSlotAlign - 1) / kSlotAlign * kSlotAlign;
}

struct Channel {
  char* const* buffers;  // [world] on the device: every rank's buffer, as mapped here
  char* multicast;       // the same buffers through the switch; null where there is none
  uint64_t* error;       // host memory: 0, or what pack_error made
  int64_t slot_bytes;    // a multiple of 16
  int64_t timeout_ns;
  int rank;
  int world;
};

// bit 63 set, phase in bits 56..62, the missing rank in bits 40..55, the epoch's low 40 bits.
__host__ __device__ constexpr uint64_t pack_error(int phase, int rank, uint64_t epoch) {
  return uint64_t{1} << 63 | static_cast<uint64_t>(phase) << 56 |
         static_cast<uint64_t>(rank) << 40 | (epoch & 0xffffffffffull);
}

namespace {

// One call of a channel, as a block sees it.
struct Call {
  const Channel& channel;
  char* own;       // this rank's buffer
  uint64_t epoch;  // of this call

  __device__ explicit Call(const Channel& c)
      : channel(c), own(c.buffers[c.rank]), epoch(*word(kEpochAt) + 1) {}

  __device__ uint64_t* word(int64_t at) const { return reinterpret_cast<uint64_t*>(own + at); }

  __device__ int64_t slot_at() const {
    return slots_at(channel.world) + static_cast<int64_t>(epoch % 2) * channel.slot_bytes;
  }

  __device__ int64_t flag_at(int phase, int writer) const {
    const int64_t row = (static_cast<int64_t>(epoch % 2) * kPhases + phase) * kMaxBlocks;
    return kFlagsAt + ((row + blockIdx.x) * channel.world + writer) * 8;
  }

  // What this block wrote before is seen by who waits for its flag.
  __device__ void publish(int phase) const {
    protocol_point();
    __syncthreads();
    for (int peer = threadIdx.x; peer < channel.world; peer += blockDim.x) {
      char* flag = channel.buffers[peer] + flag_at(phase, channel.rank);
      store_release_system(reinterpret_cast<uint64_t*>(flag), epoch);
      protocol_point();
    }
  }

  // Waits for this block's flag of every rank; all threads get one answer, false where one is late.
  __device__ bool wait(int phase) const {
    bool failed = false;
    for (int peer = threadIdx.x; peer < channel.world; peer += blockDim.x) {
      failed |= !wait_for(word(flag_at(phase, peer)), phase, peer);
      protocol_point();
    }
    const bool all_came = !__syncthreads_or(failed);
    protocol_point();
    return all_came;
  }

  __device__ bool wait_for(const uint64_t* flag, int phase, int peer) const {
    const uint64_t start = now_ns();
    while (load_acquire_system(flag) != epoch) {
      pause_spin();
      if (now_ns() - start < static_cast<uint64_t>(channel.timeout_ns)) continue;
      store_release_system(channel.error, pack_error(phase, peer, epoch));
      store_release_system(word(kDeadAt), epoch);
      return false;
    }
    return true;
  }

  __device__ bool is_dead() const {
    return __syncthreads_or(load_acquire_system(word(kDeadAt)) != 0);
  }

  // The last block counts the call. Every thread read the epoch before its block came here.
  __device__ void finish() const {
    __syncthreads();
    protocol_point();
    if (threadIdx.x != 0) return;
    if (add_acq_rel_device(word(kTicketAt), 1) + 1 != gridDim.x) return;
    *word(kTicketAt) = 0;
    *word(kEpochAt) = epoch;
  }
};

}  // namespace
}  // namespace mcp::cuda
