#include "shm/mailbox.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "shm/group.h"

namespace mcp::shm {
namespace {

// Bytes copied before the other side is told: it copies them out while the next ones go in.
constexpr size_t kBurst = 64 << 10;
// The thread's polls after the last byte moved, and its sleep between polls from then on: it is
// there for the rank that is busy elsewhere, and must not keep the core from it.
constexpr int kThreadYields = 50;
constexpr auto kThreadSleep = std::chrono::milliseconds(1);

size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

Mailbox::Mailbox(Group* group) : group_(group), sends_(group->world()), incoming_(group->world()) {}

Mailbox::~Mailbox() {
  if (!thread_) return;
  if (group_->is_foreign()) {
    thread_.release();  // it runs in the parent alone; this object only names it
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  thread_->join();
}

std::shared_ptr<Transfer> Mailbox::send(const void* data, size_t bytes, int peer, uint64_t tag) {
  return post(true, const_cast<void*>(data), bytes, peer, tag);
}

std::shared_ptr<Transfer> Mailbox::receive(void* data, size_t bytes, int peer, uint64_t tag) {
  return post(false, data, bytes, peer, tag);
}

std::shared_ptr<Transfer> Mailbox::post(bool is_send, void* data, size_t bytes, int peer,
                                        uint64_t tag) {
  group_->throw_if_dead();
  auto transfer = std::make_shared<Transfer>();
  transfer->is_send = is_send;
  transfer->peer = peer;
  transfer->tag = tag;
  transfer->data = static_cast<char*>(data);
  transfer->bytes = bytes;
  const std::lock_guard<std::mutex> lock(mutex_);
  transfer->number = is_send ? ++num_sends_ : ++num_receives_;
  if (is_send) {
    sends_[peer].push_back(transfer);
  } else {
    receives_.push_back(transfer);
  }
  ++num_open_;
  progress();
  if (!transfer->done && !thread_)
    thread_ = std::make_unique<std::thread>([this] { run_thread(); });
  if (!transfer->done) work_.notify_all();
  return transfer;
}

bool Mailbox::test(const std::shared_ptr<Transfer>& transfer) {
  if (transfer->done) return true;
  group_->throw_if_dead();
  const std::lock_guard<std::mutex> lock(mutex_);
  progress();
  return transfer->done;
}

void Mailbox::wait(const std::shared_ptr<Transfer>& transfer, double timeout_s) {
  if (transfer->done) return;
  group_->throw_if_dead();
  const auto ready = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!transfer->done) progress();
    return transfer->done.load();
  };
  const double limit = timeout_s > 0 ? timeout_s : group_->timeout_s_;
  double deadline = 0;
  group_->waiter_.wait(ready, [&] {
    if (deadline == 0) deadline = now_s() + limit;
    if (group_->interrupt_check_) group_->interrupt_check_();
    for (int peer = 0; peer < group_->world(); ++peer) {
      if (transfer->peer == kAnyRank ? peer != group_->rank() : peer == transfer->peer) {
        group_->check_waiting(describe(*transfer), deadline, limit, peer, ready);
      }
    }
  });
}

bool Mailbox::progress() {
  if (num_open_ == 0) return false;
  if (is_broken_) {
    group_->throw_if_dead();
    return false;
  }
  bool moved = false;
  for (int peer = 0; peer < group_->world(); ++peer) {
    const bool sent = !sends_[peer].empty() && progress_sends(peer);
    const bool received = progress_receives(peer);
    if (sent || received) {
      fence_before_ring();
      ring(&group_->header(peer)->doorbell);
      moved = true;
    }
  }
  return moved;
}

bool Mailbox::progress_sends(int peer) {
  bool moved = false;
  std::deque<std::shared_ptr<Transfer>>& queue = sends_[peer];
  while (!queue.empty()) {
    Transfer& transfer = *queue.front();
    size_t room = writable(peer);
    if (!transfer.announced) {
      if (room < kLine) break;
      char line[kLine] = {};
      const Envelope envelope{transfer.bytes, transfer.tag};
      std::memcpy(line, &envelope, sizeof envelope);
      write(peer, line, kLine);
      transfer.announced = moved = true;
      room -= kLine;
    }
    const size_t count = std::min({room, kBurst, transfer.bytes - transfer.moved});
    if (count > 0) {
      write(peer, transfer.data + transfer.moved, count);
      transfer.moved += count;
      moved = true;
    }
    if (transfer.moved < transfer.bytes) {
      if (count == 0) break;
      fence_before_ring();
      ring(&group_->header(peer)->doorbell);
      continue;
    }
    finish(transfer);
    queue.pop_front();
  }
  return moved;
}

bool Mailbox::progress_receives(int peer) {
  Incoming& incoming = incoming_[peer];
  bool moved = false;
  for (;;) {
    if (!incoming.aside.empty()) take_aside(peer);
    if (!incoming.current && !open_envelope(peer)) return moved;
    Message& message = *incoming.current;
    const size_t count = std::min(readable(peer), message.envelope.bytes - message.moved);
    if (count > 0) {
      char* const to = message.target ? message.target->data : message.data.data();
      read(peer, to + message.moved, count);
      message.moved += count;
      moved = true;
    }
    if (message.moved < message.envelope.bytes) return moved;
    moved = true;
    if (message.target) {
      message.target->peer = peer;
      finish(*message.target);
    } else {
      incoming.aside.push_back(std::move(incoming.current));
    }
    incoming.current.reset();
  }
}

// Reads what comes next, when somebody waits for something from `peer`: only then may it be set
// aside. Otherwise it stays in the ring, and the sender waits once the ring is full.
bool Mailbox::open_envelope(int peer) {
  if (receives_.empty() || readable(peer) < kLine) return false;
  const bool is_awaited =
      std::any_of(receives_.begin(), receives_.end(), [&](const std::shared_ptr<Transfer>& open) {
        return open->peer == peer || open->peer == kAnyRank;
      });
  if (!is_awaited) return false;
  char line[kLine];
  read(peer, line, kLine);
  auto message = std::make_unique<Message>();
  std::memcpy(&message->envelope, line, sizeof message->envelope);
  message->target = match(peer, message->envelope);
  if (!message->target) message->data.resize(message->envelope.bytes);
  incoming_[peer].current = std::move(message);
  return true;
}

// Gives messages set aside to the receives that were posted since.
void Mailbox::take_aside(int peer) {
  std::list<std::unique_ptr<Message>>& aside = incoming_[peer].aside;
  for (auto message = aside.begin(); message != aside.end();) {
    const std::shared_ptr<Transfer> target = match(peer, (*message)->envelope);
    if (!target) {
      ++message;
      continue;
    }
    if (target->bytes > 0) std::memcpy(target->data, (*message)->data.data(), target->bytes);
    target->peer = peer;
    finish(*target);
    message = aside.erase(message);
  }
}

// The first receive posted for it, which is then no longer open to others.
std::shared_ptr<Transfer> Mailbox::match(int peer, const Envelope& envelope) {
  const auto found =
      std::find_if(receives_.begin(), receives_.end(), [&](const std::shared_ptr<Transfer>& open) {
        return (open->peer == peer || open->peer == kAnyRank) && open->tag == envelope.tag;
      });
  if (found == receives_.end()) return nullptr;
  const std::shared_ptr<Transfer> target = *found;
  if (target->bytes != envelope.bytes) {
    is_broken_ = true;
    group_->fail(describe(*target) + ": rank " + std::to_string(peer) + " sends " +
                 std::to_string(envelope.bytes) + " bytes to rank " +
                 std::to_string(group_->rank()) + ", which expects " +
                 std::to_string(target->bytes));
  }
  receives_.erase(found);
  return target;
}

void Mailbox::finish(Transfer& transfer) {
  transfer.done = true;
  --num_open_;
}

size_t Mailbox::readable(int peer) const {
  return group_->outgoing(peer, group_->rank()).load(std::memory_order_acquire) -
         group_->consumed(peer, group_->rank()).load(std::memory_order_relaxed);
}

size_t Mailbox::writable(int peer) const {
  const int rank = group_->rank();
  return group_->layout_.ring_bytes -
         (group_->outgoing(rank, peer).load(std::memory_order_relaxed) -
          group_->consumed(rank, peer).load(std::memory_order_acquire));
}

// Rings hold whole lines: what ends within one takes the rest of it too.
void Mailbox::read(int peer, void* to, size_t bytes) {
  std::atomic<uint64_t>& tail = group_->consumed(peer, group_->rank());
  const uint64_t at = tail.load(std::memory_order_relaxed);
  const size_t capacity = group_->layout_.ring_bytes;
  const size_t begin = at % capacity;
  const size_t first = std::min(bytes, capacity - begin);
  const char* const ring = group_->ring_of(peer, group_->rank());
  std::memcpy(to, ring + begin, first);
  std::memcpy(static_cast<char*>(to) + first, ring, bytes - first);
  protocol_point();
  tail.store(at + whole_lines(bytes), std::memory_order_release);
}

void Mailbox::write(int peer, const void* from, size_t bytes) {
  std::atomic<uint64_t>& head = group_->outgoing(group_->rank(), peer);
  const uint64_t at = head.load(std::memory_order_relaxed);
  const size_t capacity = group_->layout_.ring_bytes;
  const size_t begin = at % capacity;
  const size_t first = std::min(bytes, capacity - begin);
  char* const ring = group_->ring_of(group_->rank(), peer);
  std::memcpy(ring + begin, from, first);
  std::memcpy(ring, static_cast<const char*>(from) + first, bytes - first);
  protocol_point();
  head.store(at + whole_lines(bytes), std::memory_order_release);
}

void Mailbox::run_thread() {
  std::unique_lock<std::mutex> lock(mutex_);
  int polls = 0;
  while (!stopping_) {
    if (num_open_ == 0) {
      work_.wait(lock);
      continue;
    }
    try {
      group_->throw_if_dead();
      polls = progress() ? 0 : polls + 1;
    } catch (const GroupError&) {
      return;  // whoever waits for a transfer finds the same error
    }
    if (polls < kThreadYields) {
      lock.unlock();
      ::sched_yield();
      lock.lock();
    } else {
      work_.wait_for(lock, kThreadSleep);
    }
  }
}

std::string Mailbox::describe(const Transfer& transfer) const {
  return std::string(transfer.is_send ? "send" : "recv") + " #" + std::to_string(transfer.number) +
         " (tag " + std::to_string(transfer.tag) + ") of group " + group_->config_.name;
}

}  // namespace mcp::shm
