// The ranks of one host as a group: every collective of torch.distributed over shared memory.
//
// A collective is a row of steps. In a step each rank copies what others need into one of its two
// slots, posts the step's number with the call's signature, waits until all have posted it, checks
// that their signatures equal its own, and reads their slots. Two slots are enough without a second
// wait: a rank writes slot s % 2 for step s only after all posted step s - 1, which a rank does
// only when it has read everything of step s - 2. Every rank waits for every other in every step,
// also for a broadcast: what one rank does wrong is then an error on all of them in that very call.
//
// Knows no Python and no torch. Pointers are host memory of this process; `out` may equal `in`.
// Failures throw GroupError with the call, its number, this rank and the cause; the group is then
// dead on all its ranks, and each later call throws the same.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm/layout.h"
#include "shm/reduce.h"
#include "shm/segment.h"
#include "shm/wait.h"

namespace mcp::shm {

class GroupError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Op : uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kScatter,
  kGather,
  kBarrier,
  kMatmulReduceScatter,
  kAllGatherMatmul
};

struct GroupConfig {
  std::string name;   // for messages
  std::string token;  // random, so that no other segment has this one's name
  int rank = 0;
  int world = 1;
  size_t slot_bytes = 0;    // a multiple of the page size
  size_t ring_bytes = 0;    // of point-to-point transfers, a power of two, at least a page
  int crowd = 1;            // ranks of the whole job on this host, which may outnumber the cores
  double timeout_s = 1800;  // of one wait
};

class Mailbox;
class Workspace;

class Group {
 public:
  // Creates this rank's segment. Throws std::system_error when /dev/shm cannot hold it.
  explicit Group(const GroupConfig& config);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string& segment_name() const { return own_.name(); }

  // Maps the peers' segments, by rank (this rank's is its own name), waits until they have mapped
  // this one and takes its name away. Afterwards nothing of the group has a name any more.
  void connect(const std::vector<std::string>& names);
  // The same where the ranks are threads of this process, each with a group of its own.
  void connect_threads(const std::vector<Group*>& ranks);

  // Takes away names that a failed start may have left; a name that is gone is no error.
  static void remove(const std::vector<std::string>& names);

  // Of each wait, in seconds.
  void set_timeout(double seconds) { timeout_s_ = seconds; }
  // Runs in waits of the calling thread; throws to end them, as for Ctrl-C.
  void set_interrupt_check(Check check) { interrupt_check_ = std::move(check); }

  // Each rank's `in` [n] reduced, into every rank's `out` [n].
  void all_reduce(const void* in, void* out, size_t n, Type type, Reduction reduction,
                  bool average);
  // As all_reduce, into `out` of rank `root` alone; null elsewhere.
  void reduce(const void* in, void* out, size_t n, Type type, Reduction reduction, bool average,
              int root);
  // Each rank's `in` [world, n] reduced; row r into `out` [n] of rank r.
  void reduce_scatter(const void* in, void* out, size_t n, Type type, Reduction reduction,
                      bool average);
  // Each rank's `in` [bytes] into row r of every rank's `out`, whose rows stand where `rows` says.
  void all_gather(const void* in, const std::vector<void*>& rows, size_t bytes);
  void broadcast(void* data, size_t bytes, int root);
  // in[p] [in_bytes[p]] goes to rank p, out[p] [out_bytes[p]] comes from rank p; sizes may differ.
  void all_to_all(const std::vector<const void*>& in, const std::vector<size_t>& in_bytes,
                  const std::vector<void*>& out, const std::vector<size_t>& out_bytes);
  // rows[p] [bytes] of rank `root` into `out` of rank p; `rows` is empty elsewhere.
  void scatter(const std::vector<const void*>& rows, void* out, size_t bytes, int root);
  // Rank p's `in` [bytes] into rows[p] of rank `root`; `rows` is empty elsewhere.
  void gather(const void* in, const std::vector<void*>& rows, size_t bytes, int root);
  void barrier();

  // Point-to-point transfers of this group.
  Mailbox& mailbox();

  // Ends the group: every rank's calls, the ones in flight too, throw `reason`.
  void abort(const std::string& reason);

  int rank() const { return config_.rank; }
  int world() const { return config_.world; }
  uint64_t calls() const { return calls_; }

 private:
  friend class Mailbox;
  friend class Workspace;

  struct Call {
    Op op;
    uint64_t number;  // of this call in the group, from 1
    Signature signature;
  };

  Header* header(int rank) const { return reinterpret_cast<Header*>(bases_[rank]); }
  Header* own() const { return header(rank()); }
  char* slot(int rank, uint64_t step) const {
    return bases_[rank] + layout_.slot(static_cast<int>(step % kSlots));
  }
  char* next_slot() const { return slot(rank(), step_ + 1); }

  // Bytes of the ring from -> to that were ever written, and read.
  std::atomic<uint64_t>& outgoing(int from, int to) const {
    return reinterpret_cast<Counter*>(bases_[from] + layout_.outgoing(to))->value;
  }
  std::atomic<uint64_t>& consumed(int from, int to) const {
    return reinterpret_cast<Counter*>(bases_[from] + layout_.consumed(to))->value;
  }
  char* ring_of(int from, int to) const { return bases_[from] + layout_.ring(to); }
  bool is_foreign() const { return fork_generation() != generation_; }  // in a forked child

  Call begin(Op op, size_t bytes, uint64_t details);
  Call begin(Op op, size_t bytes, Type type, Reduction reduction, bool average, int root = 0);
  void post(const Call& call);
  void await(const Call& call);
  void check_peer(const Call& call, int peer);
  void throw_if_dead() const;
  template <class Body>
  void run(const Call& call, const Body& body);

  // Part of a long wait for `peer`: throws when the group or the peer is dead, or time is up.
  void check_waiting(const std::string& what, double deadline_s, double limit_s, int peer,
                     const std::function<bool()>& ready);
  [[noreturn]] void fail(const std::string& reason);
  [[noreturn]] void fail_sizes(const Call& call, int peer, size_t sent, size_t expected);
  std::string describe(const Call& call) const;

  void reduce_whole(const Call& call, const char* in, char* out, size_t n, size_t element,
                    ReduceFunction function, bool average);
  void reduce_in_parts(const Call& call, const char* in, char* out, size_t n, size_t element,
                       ReduceFunction function, bool average);

  GroupConfig config_;
  Layout layout_;
  Segment own_;
  std::vector<Segment> peers_;
  std::vector<char*> bases_;          // by rank
  std::vector<const void*> sources_;  // of the reduction in progress, by rank
  Waiter waiter_;
  Check interrupt_check_;
  double timeout_s_;
  uint64_t generation_;  // of forks, when the group was made
  uint64_t step_ = 0;
  uint64_t calls_ = 0;
  std::mutex mutex_;  // one collective at a time
  std::unique_ptr<Mailbox> mailbox_;
};

// Seconds of a clock that never jumps.
double now_s();

}  // namespace mcp::shm
