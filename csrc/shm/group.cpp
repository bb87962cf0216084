#include "shm/group.h"

#include <time.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "shm/mailbox.h"

namespace mcp::shm {
namespace {

const char* name_of(Op op) {
  constexpr const char* kNames[] = {
      "all_reduce",       "reduce",  "reduce_scatter", "all_gather", "broadcast",
      "all_to_all",       "scatter", "gather",         "barrier",    "matmul_reduce_scatter",
      "all_gather_matmul"};
  return kNames[static_cast<int>(op)];
}

bool reduces(Op op) {
  return op == Op::kAllReduce || op == Op::kReduce || op == Op::kReduceScatter;
}

bool has_root(Op op) {
  return op == Op::kReduce || op == Op::kBroadcast || op == Op::kScatter || op == Op::kGather;
}

bool is_fused(Op op) { return op >= Op::kMatmulReduceScatter; }

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

std::string describe(const Signature& signature) {
  const Op op = static_cast<Op>(signature.kind & 0xff);
  std::string text = name_of(op);
  if (reduces(op)) {
    const bool average = signature.kind >> 24 & 1;
    const Reduction reduction = static_cast<Reduction>(signature.kind >> 16 & 0xff);
    text += std::string(" (") + (average ? "avg" : name_of(reduction)) + " of " +
            name_of(static_cast<Type>(signature.kind >> 8 & 0xff)) + ")";
  }
  if (is_fused(op)) {
    text += std::string(" (") + name_of(static_cast<Type>(signature.kind >> 8 & 0xff)) + " [" +
            std::to_string(signature.kind >> 32) + ", " + std::to_string(signature.bytes) + "])";
    return text;
  }
  if (op != Op::kBarrier) text += " of " + std::to_string(signature.bytes) + " bytes";
  if (has_root(op)) text += " with root " + std::to_string(signature.kind >> 32);
  return text;
}

}  // namespace

double now_s() {
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

Group::Group(const GroupConfig& config)
    : config_(config),
      layout_{config.world, config.slot_bytes, config.ring_bytes},
      own_(Segment::create(shm::segment_name(this_process(), config.token), layout_.total())),
      bases_(config.world, nullptr),
      sources_(config.world, nullptr),
      waiter_(nullptr, choose_patience(config.crowd, usable_cores())),
      timeout_s_(config.timeout_s),
      generation_(fork_generation()) {
  Header* const header = new (own_.data()) Header;
  header->rank = config.rank;
  header->world = config.world;
  header->slot_bytes = config.slot_bytes;
  header->ring_bytes = config.ring_bytes;
  header->process = this_process();
  char* const base = static_cast<char*>(own_.data());
  for (int peer = 0; peer < config.world; ++peer) {
    new (base + layout_.outgoing(peer)) Counter;
    new (base + layout_.consumed(peer)) Counter;
  }
  layout_.forbid_gaps(base);
  bases_[config.rank] = base;
  waiter_ = Waiter(&header->doorbell, choose_patience(config.crowd, usable_cores()));
}

Group::~Group() = default;

void Group::connect(const std::vector<std::string>& names) {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    peers_.push_back(Segment::open(names[peer], layout_.total()));
    bases_[peer] = static_cast<char*>(peers_.back().data());
    const Header* const theirs = header(peer);
    if (theirs->magic != kMagic || theirs->version != kLayoutVersion || theirs->rank != peer ||
        theirs->world != world() || theirs->slot_bytes != config_.slot_bytes ||
        theirs->ring_bytes != config_.ring_bytes) {
      throw GroupError("shm: rank " + std::to_string(peer) + " must run the same build with the " +
                       "same settings; install one version of mcp-kernels for all ranks");
    }
    layout_.forbid_gaps(bases_[peer]);
    header(peer)->mapped.value.fetch_add(1);
  }
  fence_before_ring();
  for (int peer = 0; peer < world(); ++peer) ring(&header(peer)->doorbell);

  const auto needed = static_cast<uint64_t>(world() - 1);
  const double deadline = now_s() + timeout_s_;
  for (int peer = 0; peer < world(); ++peer) {
    const auto all_mapped = [&] { return header(peer)->mapped.value.load() == needed; };
    waiter_.wait(all_mapped, [&] {
      for (int other = 0; other < world(); ++other) {
        check_waiting("start of group " + config_.name, deadline, timeout_s_, other, all_mapped);
      }
    });
  }
  for (Segment& segment : peers_) segment.unlink();
  own_.unlink();
}

void Group::connect_threads(const std::vector<Group*>& ranks) {
  for (int peer = 0; peer < world(); ++peer) {
    bases_[peer] = static_cast<char*>(ranks[peer]->own_.data());
  }
  own_.unlink();
}

void Group::remove(const std::vector<std::string>& names) {
  for (const std::string& name : names) Segment::remove(name);
}

Group::Call Group::begin(Op op, size_t bytes, uint64_t details) {
  throw_if_dead();
  return {op, ++calls_, {static_cast<uint64_t>(op) | details, bytes}};
}

Group::Call Group::begin(Op op, size_t bytes, Type type, Reduction reduction, bool average,
                         int root) {
  return begin(op, bytes,
               static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(reduction) << 16 |
                   static_cast<uint64_t>(average) << 24 | static_cast<uint64_t>(root) << 32);
}

void Group::post(const Call& call) {
  ++step_;
  Progress& progress = own()->progress;
  progress.signature[step_ % kSlots] = call.signature;
  protocol_point();
  progress.posted.store(step_, std::memory_order_release);
  fence_before_ring();
  protocol_point();
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank()) ring(&header(peer)->doorbell);
  }
}

void Group::await(const Call& call) {
  for (int distance = 1; distance < world(); ++distance) {
    const int peer = (rank() + distance) % world();
    const std::atomic<uint64_t>& posted = header(peer)->progress.posted;
    const uint64_t step = step_;
    const auto ready = [&posted, step] { return posted.load(std::memory_order_acquire) >= step; };
    double deadline = 0;
    waiter_.wait(ready, [&] {
      if (deadline == 0) deadline = now_s() + timeout_s_;
      if (interrupt_check_) interrupt_check_();
      check_waiting(describe(call), deadline, timeout_s_, peer, ready);
    });
    protocol_point();
    check_peer(call, peer);
  }
}

void Group::check_peer(const Call& call, int peer) {
  const Signature theirs = header(peer)->progress.signature[step_ % kSlots];
  if (theirs == call.signature) return;
  fail("ranks must make the same calls in the same order, but call #" +
       std::to_string(call.number) + " of group " + config_.name + " is " +
       shm::describe(call.signature) + " on rank " + std::to_string(rank()) + " and " +
       shm::describe(theirs) + " on rank " + std::to_string(peer));
}

void Group::check_waiting(const std::string& call, double deadline_s, double limit_s, int peer,
                          const std::function<bool()>& ready) {
  throw_if_dead();
  const std::string who = call + ": rank " + std::to_string(peer);
  const std::string seen = " (seen by rank " + std::to_string(rank()) + ")";
  const Process& process = header(peer)->process;
  // What it posted before its end counts, so the flag is read again after the look at the process.
  if (peer != rank() && has_ended(process) && !ready()) {
    fail(who + ", " + "process " + std::to_string(process.id) + ", has ended" + seen +
         "; the first error of that rank says why");
  }
  if (now_s() > deadline_s && !ready()) {
    fail(who + ", " + "process " + std::to_string(process.id) + ", did not take part within " +
         seconds_text(limit_s) + seen +
         "; see what holds that rank up, or raise the timeout of the process group");
  }
}

void Group::fail(const std::string& reason) {
  abort(reason);
  // Another rank may have been first; this call and all later ones give the reason that stands.
  const Abort& mark = own()->abort;
  for (int i = 0; i < 1000 && mark.state.load(std::memory_order_acquire) != 2; ++i) pause_cpu();
  throw_if_dead();
  throw GroupError("shm: " + reason);  // whoever writes the mark has died at it
}

std::string Group::describe(const Call& call) const {
  return std::string(name_of(call.op)) + " #" + std::to_string(call.number) + " of group " +
         config_.name;
}

void Group::throw_if_dead() const {
  if (is_foreign()) {
    throw GroupError(
        "shm: group " + config_.name + " belongs to the process that this one was forked from; " +
        "call init_process_group in the child, or fork before the parent joins a group");
  }
  const Abort& mark = own()->abort;
  if (mark.state.load(std::memory_order_acquire) == 2) {
    throw GroupError(std::string("shm: ") + mark.text);
  }
}

void Group::abort(const std::string& reason) {
  for (int peer = 0; peer < world(); ++peer) {
    if (bases_[peer] == nullptr) continue;
    Abort& mark = header(peer)->abort;
    uint32_t none = 0;
    if (!mark.state.compare_exchange_strong(none, 1)) continue;  // the first reason stays
    std::snprintf(mark.text, sizeof mark.text, "%s", reason.c_str());
    mark.state.store(2, std::memory_order_release);
  }
  fence_before_ring();
  for (int peer = 0; peer < world(); ++peer) {
    if (bases_[peer] != nullptr) ring(&header(peer)->doorbell);
  }
}

Mailbox& Group::mailbox() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!mailbox_) mailbox_ = std::make_unique<Mailbox>(this);
  return *mailbox_;
}

}  // namespace mcp::shm
