// Point-to-point transfers of a group: each ordered pair of ranks has a ring of bytes.
//
// A transfer is posted and completes later, as torch's isend and irecv want it: ranks that send to
// each other before either receives must not deadlock. What fits into the ring is done at once. The
// rest moves whenever this rank waits for any transfer, and by a thread of this rank's own
// meanwhile, which exists from the first transfer that did not complete at once and sleeps while
// none is open. Messages of one pair and tag arrive in order; one whose tag nobody waits for yet is
// set aside, so that it does not block those behind it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shm/layout.h"
#include "shm/wait.h"

namespace mcp::shm {

class Group;

constexpr int kAnyRank = -1;

// One posted send or receive. The memory at `data` is the caller's until `done`.
struct Transfer {
  bool is_send;
  std::atomic<int> peer;  // kAnyRank until a message matched, by whichever thread moves it
  uint64_t tag;
  char* data;
  size_t bytes;
  uint64_t number;  // of this kind in the group, from 1
  size_t moved = 0;
  bool announced = false;  // a send whose header stands in the ring
  std::atomic<bool> done{false};
};

class Mailbox {
 public:
  explicit Mailbox(Group* group);
  // Open transfers are given up.
  ~Mailbox();

  std::shared_ptr<Transfer> send(const void* data, size_t bytes, int peer, uint64_t tag);
  // `peer` may be kAnyRank.
  std::shared_ptr<Transfer> receive(void* data, size_t bytes, int peer, uint64_t tag);

  // Whether it is done; moves what can be moved first.
  bool test(const std::shared_ptr<Transfer>& transfer);
  // Until it is done. Throws GroupError as collectives do; 0 takes the group's timeout.
  void wait(const std::shared_ptr<Transfer>& transfer, double timeout_s);

 private:
  struct Envelope {
    uint64_t bytes;
    uint64_t tag;
  };
  // Straight into `target`, or set aside in `data`.
  struct Message {
    Envelope envelope;
    std::vector<char> data;
    size_t moved = 0;
    std::shared_ptr<Transfer> target;
  };
  struct Incoming {
    std::unique_ptr<Message> current;           // its envelope is read, not yet all its bytes
    std::list<std::unique_ptr<Message>> aside;  // complete
  };

  std::shared_ptr<Transfer> post(bool is_send, void* data, size_t bytes, int peer, uint64_t tag);
  // Moves what can be moved now; whether that was anything.
  bool progress();
  bool progress_sends(int peer);
  bool progress_receives(int peer);
  bool open_envelope(int peer);
  void take_aside(int peer);
  std::shared_ptr<Transfer> match(int peer, const Envelope& envelope);
  void finish(Transfer& transfer);
  size_t readable(int peer) const;
  size_t writable(int peer) const;
  void read(int peer, void* to, size_t bytes);
  void write(int peer, const void* from, size_t bytes);
  void run_thread();
  std::string describe(const Transfer& transfer) const;

  Group* group_;
  std::mutex mutex_;                                          // over everything below
  std::vector<std::deque<std::shared_ptr<Transfer>>> sends_;  // by receiver, in order
  std::list<std::shared_ptr<Transfer>> receives_;             // not matched yet, in order
  std::vector<Incoming> incoming_;                            // by sender
  size_t num_open_ = 0;
  uint64_t num_sends_ = 0;
  uint64_t num_receives_ = 0;
  // A message had another size than its receive: what follows in the ring is no envelope.
  bool is_broken_ = false;
  bool stopping_ = false;
  std::condition_variable work_;  // for the thread, when there is some again
  std::unique_ptr<std::thread> thread_;
};

}  // namespace mcp::shm
