// The collectives of group.h as steps.
#include <algorithm>
#include <cstring>

#include "shm/group.h"

namespace mcp::shm {
namespace {

// Up to here a rank reads all copies whole: one wait instead of two. Above, the ranks share the
// work. Counted over all peers' copies, which one rank reads. Measured at two ranks: 128 KiB of
// float32 take 15 us whole and 19 us shared; 256 KiB of bfloat16, dearer to add, 38 and 30.
constexpr size_t kReadWholeBytes = 192 << 10;

// Parts begin at cache lines, so that two ranks never write to one.
size_t part_elements(size_t n, int world, size_t element) {
  const size_t line = std::max<size_t>(1, kLine / element);
  const size_t part = (n + world - 1) / world;
  return (part + line - 1) / line * line;
}

struct Span {
  size_t begin;
  size_t count;
};

// Part `index` of `n` elements cut into parts of `part`; the last ones may be short or empty.
Span part_of(size_t n, size_t part, int index) {
  const size_t begin = std::min(n, part * index);
  return {begin, std::min(part, n - begin)};
}

// Place of what goes to rank `to` among the W - 1 parts that rank `from` publishes.
size_t place(int from, int to) { return to < from ? to : to - 1; }

uint64_t root_bits(int root) { return static_cast<uint64_t>(root) << 32; }

// Throws std::invalid_argument where the type has no such reduction.
ReduceFunction function_for(Type type, Reduction reduction) {
  const ReduceFunction function = find_reduce(type, reduction);
  if (function != nullptr) return function;
  throw std::invalid_argument(std::string("shm: the bits reduction \"") + name_of(reduction) +
                              "\" must have integers, got " + name_of(type));
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

// Any way out but the normal one leaves the peers waiting for this rank: tell them.
template <class Body>
void Group::run(const Call& call, const Body& body) {
  try {
    body();
  } catch (const GroupError&) {
    throw;  // told
  } catch (...) {
    abort(describe(call) + " was interrupted on rank " + std::to_string(rank()));
    throw;
  }
}

void Group::all_reduce(const void* in, void* out, size_t n, Type type, Reduction reduction,
                       bool average) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t element = size_of(type);
  const ReduceFunction function = function_for(type, reduction);
  const Call call = begin(Op::kAllReduce, n * element, type, reduction, average);
  const char* const from = static_cast<const char*>(in);
  char* const to = static_cast<char*>(out);
  run(call, [&] {
    const size_t bytes = n * element;
    if (world() == 1) {
      copy(out, in, bytes);
    } else if (bytes <= layout_.slot_bytes && bytes * (world() - 1) <= kReadWholeBytes) {
      reduce_whole(call, from, to, n, element, function, average);
    } else {
      const size_t room = layout_.slot_bytes / (world() - 1) / kLine * kLine / element;
      const size_t piece = room * world();
      for (size_t begin = 0; begin < n; begin += piece) {
        reduce_in_parts(call, from + begin * element, to + begin * element,
                        std::min(piece, n - begin), element, function, average);
      }
    }
  });
}

void Group::reduce_whole(const Call& call, const char* in, char* out, size_t n, size_t element,
                         ReduceFunction function, bool average) {
  copy(next_slot(), in, n * element);
  post(call);
  await(call);
  for (int peer = 0; peer < world(); ++peer) sources_[peer] = slot(peer, step_);
  sources_[rank()] = in;
  function({sources_.data(), world(), out, nullptr, n, average});
}

void Group::reduce_in_parts(const Call& call, const char* in, char* out, size_t n, size_t element,
                            ReduceFunction function, bool average) {
  const size_t part = part_elements(n, world(), element);
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    const Span span = part_of(n, part, peer);
    copy(next_slot() + place(rank(), peer) * part * element, in + span.begin * element,
         span.count * element);
  }
  post(call);
  await(call);

  const Span mine = part_of(n, part, rank());
  for (int peer = 0; peer < world(); ++peer) {
    sources_[peer] = slot(peer, step_) + place(peer, rank()) * part * element;
  }
  sources_[rank()] = in + mine.begin * element;
  function(
      {sources_.data(), world(), out + mine.begin * element, next_slot(), mine.count, average});
  post(call);
  await(call);

  for (int distance = 1; distance < world(); ++distance) {
    const int peer = (rank() + distance) % world();
    const Span span = part_of(n, part, peer);
    copy(out + span.begin * element, slot(peer, step_), span.count * element);
  }
}

void Group::reduce(const void* in, void* out, size_t n, Type type, Reduction reduction,
                   bool average, int root) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t element = size_of(type);
  const ReduceFunction function = function_for(type, reduction);
  const Call call = begin(Op::kReduce, n * element, type, reduction, average, root);
  const size_t piece = layout_.slot_bytes / element;
  run(call, [&] {
    for (size_t begin = 0; begin < n || begin == 0; begin += piece) {
      const size_t count = std::min(piece, n - begin);
      const char* const from = static_cast<const char*>(in) + begin * element;
      if (rank() != root) copy(next_slot(), from, count * element);
      post(call);
      await(call);
      if (rank() != root) continue;
      for (int peer = 0; peer < world(); ++peer) sources_[peer] = slot(peer, step_);
      sources_[rank()] = from;
      char* const to = static_cast<char*>(out) + begin * element;
      function({sources_.data(), world(), to, nullptr, count, average});
    }
  });
}

void Group::reduce_scatter(const void* in, void* out, size_t n, Type type, Reduction reduction,
                           bool average) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t element = size_of(type);
  const ReduceFunction function = function_for(type, reduction);
  const Call call = begin(Op::kReduceScatter, n * element, type, reduction, average);
  const char* const from = static_cast<const char*>(in);
  run(call, [&] {
    if (world() == 1) return copy(out, in, n * element);
    const size_t piece = layout_.slot_bytes / (world() - 1) / kLine * kLine / element;
    for (size_t begin = 0; begin < n || begin == 0; begin += piece) {
      const size_t count = std::min(piece, n - begin);
      for (int peer = 0; peer < world(); ++peer) {
        if (peer == rank()) continue;
        copy(next_slot() + place(rank(), peer) * piece * element,
             from + (peer * n + begin) * element, count * element);
      }
      post(call);
      await(call);
      for (int peer = 0; peer < world(); ++peer) {
        sources_[peer] = slot(peer, step_) + place(peer, rank()) * piece * element;
      }
      sources_[rank()] = from + (rank() * n + begin) * element;
      char* const to = static_cast<char*>(out) + begin * element;
      function({sources_.data(), world(), to, nullptr, count, average});
    }
  });
}

void Group::all_gather(const void* in, const std::vector<void*>& rows, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin(Op::kAllGather, bytes, 0);
  run(call, [&] {
    copy(rows[rank()], in, bytes);
    if (world() == 1) return;
    for (size_t begin = 0; begin < bytes || begin == 0; begin += layout_.slot_bytes) {
      const size_t count = std::min(layout_.slot_bytes, bytes - begin);
      copy(next_slot(), static_cast<const char*>(in) + begin, count);
      post(call);
      await(call);
      for (int distance = 1; distance < world(); ++distance) {
        const int peer = (rank() + distance) % world();
        copy(static_cast<char*>(rows[peer]) + begin, slot(peer, step_), count);
      }
    }
  });
}

void Group::broadcast(void* data, size_t bytes, int root) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin(Op::kBroadcast, bytes, root_bits(root));
  run(call, [&] {
    for (size_t begin = 0; begin < bytes || begin == 0; begin += layout_.slot_bytes) {
      const size_t count = std::min(layout_.slot_bytes, bytes - begin);
      char* const at = static_cast<char*>(data) + begin;
      if (rank() == root) copy(next_slot(), at, count);
      post(call);
      await(call);
      if (rank() != root) copy(at, slot(root, step_), count);
    }
  });
}

void Group::all_to_all(const std::vector<const void*>& in, const std::vector<size_t>& in_bytes,
                       const std::vector<void*>& out, const std::vector<size_t>& out_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin(Op::kAllToAll, 0, 0);
  run(call, [&] {
    copy(out[rank()], in[rank()], in_bytes[rank()]);
    if (in_bytes[rank()] != out_bytes[rank()])
      fail_sizes(call, rank(), in_bytes[rank()], out_bytes[rank()]);
    if (world() == 1) return;

    // First the table of sizes: who sends how much decides how many rounds all of them take.
    copy(next_slot(), in_bytes.data(), world() * sizeof(size_t));
    post(call);
    await(call);
    size_t most = 0;
    for (int peer = 0; peer < world(); ++peer) {
      const size_t* const theirs = reinterpret_cast<const size_t*>(slot(peer, step_));
      for (int to = 0; to < world(); ++to) most = std::max(most, to == peer ? 0 : theirs[to]);
    }
    std::vector<size_t> sent(world());
    for (int peer = 0; peer < world(); ++peer) {
      sent[peer] = reinterpret_cast<const size_t*>(slot(peer, step_))[rank()];
      if (sent[peer] != out_bytes[peer]) fail_sizes(call, peer, sent[peer], out_bytes[peer]);
    }

    const size_t piece = layout_.slot_bytes / (world() - 1) / kLine * kLine;
    for (size_t begin = 0; begin < most || begin == 0; begin += piece) {
      for (int peer = 0; peer < world(); ++peer) {
        if (peer == rank() || in_bytes[peer] <= begin) continue;
        copy(next_slot() + place(rank(), peer) * piece, static_cast<const char*>(in[peer]) + begin,
             std::min(piece, in_bytes[peer] - begin));
      }
      post(call);
      await(call);
      for (int peer = 0; peer < world(); ++peer) {
        if (peer == rank() || out_bytes[peer] <= begin) continue;
        copy(static_cast<char*>(out[peer]) + begin, slot(peer, step_) + place(peer, rank()) * piece,
             std::min(piece, out_bytes[peer] - begin));
      }
    }
  });
}

void Group::scatter(const std::vector<const void*>& rows, void* out, size_t bytes, int root) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin(Op::kScatter, bytes, root_bits(root));
  run(call, [&] {
    if (rank() == root) copy(out, rows[rank()], bytes);
    if (world() == 1) return;
    const size_t piece = layout_.slot_bytes / (world() - 1) / kLine * kLine;
    for (size_t begin = 0; begin < bytes || begin == 0; begin += piece) {
      const size_t count = std::min(piece, bytes - begin);
      for (int peer = 0; rank() == root && peer < world(); ++peer) {
        if (peer == root) continue;
        copy(next_slot() + place(root, peer) * piece, static_cast<const char*>(rows[peer]) + begin,
             count);
      }
      post(call);
      await(call);
      if (rank() != root) {
        copy(static_cast<char*>(out) + begin, slot(root, step_) + place(root, rank()) * piece,
             count);
      }
    }
  });
}

void Group::gather(const void* in, const std::vector<void*>& rows, size_t bytes, int root) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin(Op::kGather, bytes, root_bits(root));
  run(call, [&] {
    for (size_t begin = 0; begin < bytes || begin == 0; begin += layout_.slot_bytes) {
      const size_t count = std::min(layout_.slot_bytes, bytes - begin);
      if (rank() != root) copy(next_slot(), static_cast<const char*>(in) + begin, count);
      post(call);
      await(call);
      for (int peer = 0; rank() == root && peer < world(); ++peer) {
        const void* const from =
            peer == root ? static_cast<const char*>(in) + begin : slot(peer, step_);
        copy(static_cast<char*>(rows[peer]) + begin, from, count);
      }
    }
  });
}

void Group::barrier() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Call call = begin(Op::kBarrier, 0, 0);
  run(call, [&] {
    post(call);
    await(call);
  });
}

void Group::fail_sizes(const Call& call, int peer, size_t sent, size_t expected) {
  fail(describe(call) + ": rank " + std::to_string(peer) + " sends " + std::to_string(sent) +
       " bytes to rank " + std::to_string(rank()) + ", which expects " + std::to_string(expected));
}

}  // namespace mcp::shm
