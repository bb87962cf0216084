// Where a matmul leaves its product for its collective: slots that a rank computes straight into,
// publishes chunk by chunk, and reads from its peers while it goes on computing.
//
// A rank has a ring of kDepth slots and three counters of chunks, which only grow:
//
//   filled    chunks that stand in its slots, for all to read
//   reduced   chunks whose share of the sum it has taken; in two stages that share stands in its
//   slot drained   chunks that it needs nothing of any more, from anyone
//
// Chunk c may be written to its slot when every rank has drained chunk c - kDepth. Nobody waits in
// between: what is up is taken whenever a rank passes by (`advance`), and the rest in `finish`. The
// same calls on all ranks make the same chunks, so a count says all.
//
// A call is a step of the group as well (group.h): its signature is posted when it begins and held
// against the peers' while it waits, so that a rank that makes another call is an error on all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "shm/group.h"

namespace mcp::shm {

constexpr int kDepth = 4;

// A matrix [rows, columns] whose ranks' copies are to be summed, and the part of it that this rank
// gets: rows `first` to `first + count` of every `period` rows, columns `first_column` on.
struct SumCall {
  Op op;
  Type type;
  size_t rows, columns;
  size_t period, first, count;  // rows % period == 0
  size_t first_column, num_columns;
  char* out;         // [rows / period * count, num_columns]
  size_t out_pitch;  // elements from row to row
  const char* bias;  // [columns] or null; added once, last
  bool in_stages;    // the ranks share the work and copy each other's part; out is all of it
};

// Rank p's bytes, `outer` runs of runs[p] bytes, go to out + o * pitch + (runs before p) of all.
struct GatherCall {
  Op op;
  Type type;
  size_t outer;
  std::vector<size_t> runs;  // [world]
  char* out;
  size_t pitch;
};

class Workspace {
 public:
  // Creates this rank's segment. Throws std::system_error when /dev/shm cannot hold it.
  Workspace(std::shared_ptr<Group> group, const std::string& token, size_t slot_bytes);

  const std::string& segment_name() const { return own_.name(); }
  size_t slot_bytes() const { return slot_bytes_; }
  // This rank's slots, one after another.
  char* slots() const { return bases_[rank()] + kHeader; }
  size_t bytes() const { return slot_bytes_ * kDepth; }

  // Maps the peers' segments, waits until they have mapped this one, takes its name away.
  void connect(const std::vector<std::string>& names);
  // The same where the ranks are threads of this process.
  void connect_threads(const std::vector<Workspace*>& ranks);

  // Each begins a call and gives the slot for its first chunk.
  int begin_sum(const SumCall& call);
  int begin_gather(const GatherCall& call);
  // The slot for the next chunk; waits while a peer still reads what stood there.
  int next_slot();

  // The slot holds rows `row`.. and columns `column`.. of the matrix, [rows, columns] contiguous.
  void publish_sum(size_t row, size_t rows, size_t column, size_t columns);
  // The slot holds the whole matrix: publishes it and finishes.
  void publish_whole();
  // The slot holds the next `bytes` of this rank's; every rank publishes as many pieces.
  void publish_piece();
  // Takes what is up; whether that was anything.
  bool advance();
  // Waits for all published pieces of one rank.
  void take(int peer);
  // Takes everything, waiting for it, and ends the call.
  void finish();

 private:
  struct alignas(kLine) Flags {
    std::atomic<uint64_t> filled{0};
    std::atomic<uint64_t> reduced{0};
    std::atomic<uint64_t> drained{0};
  };
  struct Block {
    size_t row, rows, column, columns;
  };
  enum class Mode { kNone, kSum, kGather };
  using Flag = std::atomic<uint64_t> Flags::*;

  static constexpr size_t kHeader = 4096;

  int rank() const { return group_->rank(); }
  int world() const { return group_->world(); }
  Flags& flags(int rank) const { return *reinterpret_cast<Flags*>(bases_[rank]); }
  char* slot(int rank, uint64_t chunk) const {
    return bases_[rank] + kHeader + slot_bytes_ * (chunk % kDepth);
  }
  Block& block(uint64_t chunk) { return blocks_[chunk % kDepth]; }

  void begin(Op op, Type type, size_t rows, size_t columns);
  bool all_reached(Flag flag, uint64_t chunk) const;
  template <class Ready>
  void wait(const Ready& ready);
  void tell(Flag flag, uint64_t value);

  bool advance_sum();
  bool advance_gather();
  void reduce_block(uint64_t chunk);
  void reduce_rows(uint64_t chunk, size_t begin, size_t end, char* out, bool keeps);
  void copy_shares(uint64_t chunk);
  bool take_pieces(int peer);
  void copy_piece(uint64_t chunk, int peer);

  std::shared_ptr<Group> group_;
  size_t slot_bytes_;
  Segment own_;
  std::vector<Segment> peers_;
  std::vector<char*> bases_;  // by rank
  Mode mode_ = Mode::kNone;
  Group::Call call_{};
  SumCall sum_{};
  GatherCall gather_{};
  ReduceFunction function_ = nullptr;
  std::vector<const void*> sources_;
  std::vector<uint64_t> taken_;  // by rank: pieces copied, as a chunk number
  Block blocks_[kDepth];
  uint64_t first_ = 0;      // chunks before this call
  uint64_t published_ = 0;  // as `filled` of this rank, and so on
  uint64_t reduced_ = 0;
  uint64_t drained_ = 0;
};

}  // namespace mcp::shm
