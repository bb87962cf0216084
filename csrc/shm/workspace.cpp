#include "shm/workspace.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace mcp::shm {
namespace {

// Rows `index` of `world` equal shares of `rows`.
size_t share_begin(size_t rows, int world, int index) { return rows * index / world; }

}  // namespace

Workspace::Workspace(std::shared_ptr<Group> group, const std::string& token, size_t slot_bytes)
    : group_(std::move(group)),
      slot_bytes_(slot_bytes),
      own_(
          Segment::create(shm::segment_name(this_process(), token), kHeader + slot_bytes * kDepth)),
      bases_(world(), nullptr),
      sources_(world() + 1, nullptr),
      taken_(world(), 0) {
  static_assert(sizeof(Flags) <= kHeader, "the flags come before the slots");
  new (own_.data()) Flags;
  bases_[rank()] = static_cast<char*>(own_.data());
}

void Workspace::connect(const std::vector<std::string>& names) {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    peers_.push_back(Segment::open(names[peer], own_.bytes()));
    bases_[peer] = static_cast<char*>(peers_.back().data());
  }
  group_->barrier();
  own_.unlink();
}

void Workspace::connect_threads(const std::vector<Workspace*>& ranks) {
  for (int peer = 0; peer < world(); ++peer) {
    bases_[peer] = static_cast<char*>(ranks[peer]->own_.data());
  }
  group_->barrier();
  own_.unlink();
}

void Workspace::begin(Op op, Type type, size_t rows, size_t columns) {
  const std::lock_guard<std::mutex> lock(group_->mutex_);
  const uint64_t details = static_cast<uint64_t>(type) << 8 | static_cast<uint64_t>(rows) << 32;
  call_ = group_->begin(op, columns, details);
  group_->post(call_);
  first_ = published_;
}

int Workspace::begin_sum(const SumCall& call) {
  mode_ = Mode::kSum;
  sum_ = call;
  function_ = find_reduce(call.type, Reduction::kSum);
  begin(call.op, call.type, call.rows, call.columns);
  return next_slot();
}

int Workspace::begin_gather(const GatherCall& call) {
  mode_ = Mode::kGather;
  gather_ = call;
  size_t row = 0;
  for (const size_t run : call.runs) row += run;
  begin(call.op, call.type, call.outer, row);
  std::fill(taken_.begin(), taken_.end(), published_);
  return next_slot();
}

int Workspace::next_slot() {
  const uint64_t chunk = published_ + 1;
  if (chunk > kDepth) {
    const uint64_t before = chunk - kDepth;
    const auto is_free = [&] {
      if (all_reached(&Flags::drained, before)) return true;
      return advance() && all_reached(&Flags::drained, before);
    };
    wait(is_free);
  }
  return static_cast<int>(chunk % kDepth);
}

bool Workspace::all_reached(Flag flag, uint64_t chunk) const {
  for (int distance = 1; distance <= world(); ++distance) {
    const int peer = (rank() + distance) % world();
    if ((flags(peer).*flag).load(std::memory_order_acquire) < chunk) return false;
  }
  return true;
}

template <class Ready>
void Workspace::wait(const Ready& ready) {
  double deadline = 0;
  group_->waiter_.wait(ready, [&] {
    if (deadline == 0) deadline = now_s() + group_->timeout_s_;
    if (group_->interrupt_check_) group_->interrupt_check_();
    for (int peer = 0; peer < world(); ++peer) {
      if (peer == rank()) continue;
      // A rank in another call will never fill a chunk of this one.
      const Progress& progress = group_->header(peer)->progress;
      if (progress.posted.load(std::memory_order_acquire) >= group_->step_) {
        group_->check_peer(call_, peer);
      }
      group_->check_waiting(group_->describe(call_), deadline, group_->timeout_s_, peer, ready);
    }
  });
}

void Workspace::tell(Flag flag, uint64_t value) {
  protocol_point();
  (flags(rank()).*flag).store(value, std::memory_order_release);
  fence_before_ring();
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank()) ring(&group_->header(peer)->doorbell);
  }
}

void Workspace::publish_sum(size_t row, size_t rows, size_t column, size_t columns) {
  ++published_;
  block(published_) = {row, rows, column, columns};
  tell(&Flags::filled, published_);
  advance();
}

void Workspace::publish_whole() {
  publish_sum(0, sum_.rows, 0, sum_.columns);
  finish();
}

void Workspace::publish_piece() { tell(&Flags::filled, ++published_); }

bool Workspace::advance() { return mode_ == Mode::kSum ? advance_sum() : advance_gather(); }

// Shares first: peers wait for them, and for nothing of what this rank copies for itself.
bool Workspace::advance_sum() {
  bool moved = false;
  for (;;) {
    if (reduced_ < published_ && all_reached(&Flags::filled, reduced_ + 1)) {
      protocol_point();
      reduce_block(++reduced_);
      if (sum_.in_stages) {
        tell(&Flags::reduced, reduced_);
      } else {
        (flags(rank()).reduced).store(reduced_, std::memory_order_relaxed);
        tell(&Flags::drained, drained_ = reduced_);
      }
    } else if (drained_ < reduced_ && all_reached(&Flags::reduced, drained_ + 1)) {
      copy_shares(drained_ + 1);
      tell(&Flags::drained, ++drained_);
    } else {
      return moved;
    }
    moved = true;
  }
}

void Workspace::reduce_block(uint64_t chunk) {
  const Block& here = block(chunk);
  const size_t element = size_of(sum_.type);
  if (sum_.in_stages) {
    const size_t begin = share_begin(here.rows, world(), rank());
    const size_t end = share_begin(here.rows, world(), rank() + 1);
    const size_t at = (here.row + begin) * sum_.out_pitch;
    reduce_rows(chunk, begin, end, sum_.out + at * element, true);
    return;
  }
  const size_t last_period = (here.row + here.rows - 1) / sum_.period;
  for (size_t outer = here.row / sum_.period; outer <= last_period; ++outer) {
    const size_t mine = outer * sum_.period + sum_.first;
    const size_t begin = std::max(mine, here.row);
    const size_t end = std::min(mine + sum_.count, here.row + here.rows);
    if (begin >= end) continue;
    const size_t at = (outer * sum_.count + begin - mine) * sum_.out_pitch;
    reduce_rows(chunk, begin - here.row, end - here.row, sum_.out + at * element, false);
  }
}

// Rows of the chunk, in rank order and the bias last, into rows of `out` that begin at column
// `first_column`; with `keeps` also into this rank's own slot, where no peer reads them before.
void Workspace::reduce_rows(uint64_t chunk, size_t begin, size_t end, char* out, bool keeps) {
  const Block& here = block(chunk);
  const size_t element = size_of(sum_.type);
  const size_t left = std::max(here.column, sum_.first_column);
  const size_t right = std::min(here.column + here.columns, sum_.first_column + sum_.num_columns);
  if (left >= right) return;
  size_t n = right - left;
  const size_t skip = left - here.column;
  int num_sources = world();
  if (sum_.bias != nullptr) sources_[num_sources++] = sum_.bias + left * element;
  out += (left - sum_.first_column) * element;
  if (n == here.columns && n == sum_.out_pitch && sum_.bias == nullptr) {
    n *= end - begin;  // rows that stand behind each other everywhere are one
    end = begin + 1;
  }
  for (size_t row = begin; row < end; ++row) {
    const size_t at = (row * here.columns + skip) * element;
    for (int peer = 0; peer < world(); ++peer) sources_[peer] = slot(peer, chunk) + at;
    void* const copy = keeps ? slot(rank(), chunk) + at : nullptr;
    function_({sources_.data(), num_sources, out, copy, n, false});
    out += sum_.out_pitch * element;
  }
}

void Workspace::copy_shares(uint64_t chunk) {
  const Block& here = block(chunk);
  const size_t element = size_of(sum_.type);
  const size_t width = here.columns * element;
  for (int distance = 1; distance < world(); ++distance) {
    const int peer = (rank() + distance) % world();
    const size_t end = share_begin(here.rows, world(), peer + 1);
    for (size_t row = share_begin(here.rows, world(), peer); row < end; ++row) {
      char* const out = sum_.out + ((here.row + row) * sum_.out_pitch + here.column) * element;
      std::memcpy(out, slot(peer, chunk) + row * width, width);
    }
  }
}

// Pieces in their order, one of every rank at a time, so that slots become free.
bool Workspace::advance_gather() {
  bool moved = false;
  for (int peer = 0; peer < world(); ++peer) {
    if (take_pieces(peer)) moved = true;
  }
  return moved;
}

bool Workspace::take_pieces(int peer) {
  protocol_point();
  const uint64_t stands = flags(peer).filled.load(std::memory_order_acquire);
  const uint64_t until = std::min(stands, published_);
  const bool moved = taken_[peer] < until;
  while (taken_[peer] < until) copy_piece(++taken_[peer], peer);
  const uint64_t drained = *std::min_element(taken_.begin(), taken_.end());
  if (drained > drained_) {
    reduced_ = drained_ = drained;
    tell(&Flags::drained, drained);
  }
  return moved;
}

void Workspace::copy_piece(uint64_t chunk, int peer) {
  const size_t run = gather_.runs[peer];
  if (run == 0) return;
  const size_t total = run * gather_.outer;
  size_t at = std::min((chunk - first_ - 1) * slot_bytes_, total);
  const size_t end = std::min(at + slot_bytes_, total);
  const char* from = slot(peer, chunk);
  char* out = gather_.out;
  for (int before = 0; before < peer; ++before) out += gather_.runs[before];
  while (at < end) {
    const size_t within = at % run;
    const size_t count = std::min(run - within, end - at);
    std::memcpy(out + at / run * gather_.pitch + within, from, count);
    from += count;
    at += count;
  }
}

void Workspace::take(int peer) {
  const auto is_here = [&] {
    return flags(peer).filled.load(std::memory_order_acquire) >= published_;
  };
  wait(is_here);
  take_pieces(peer);
}

void Workspace::finish() {
  const auto is_done = [&] {
    return drained_ == published_ || (advance(), drained_ == published_);
  };
  wait(is_done);
  const std::lock_guard<std::mutex> lock(group_->mutex_);
  group_->await(call_);
  mode_ = Mode::kNone;
}

}  // namespace mcp::shm
