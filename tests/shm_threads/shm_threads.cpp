// The shared-memory protocol with threads as ranks, for ThreadSanitizer: every collective, sends
// and receives, and the workspace of the fused matmuls, with random delays at every protocol point.
//
// Each rank has a group of its own; all of them see one mapping of each segment, since the
// sanitizer knows memory by its address in the process. Every result is compared with what it must
// be, and sums bit for bit between ranks. Usage: shm_threads SEED CALLS [WORLD]; status 0 when all
// held.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shm/group.h"
#include "shm/mailbox.h"
#include "shm/workspace.h"

namespace mcp::shm {

thread_local std::minstd_rand* delays = nullptr;

void protocol_point() {
  if (delays == nullptr) return;  // a mailbox's own thread
  switch ((*delays)() % 16) {
    case 0:
      ::usleep((*delays)() % 50);
      break;
    case 1:
    case 2:
      ::sched_yield();
      break;
    default:
      for (unsigned i = (*delays)() % 64; i > 0; --i) pause_cpu();
  }
}

}  // namespace mcp::shm

namespace {

using namespace mcp::shm;

constexpr size_t kSlotBytes = 4096, kRingBytes = 4096, kWorkspaceSlot = 1024;

[[noreturn]] void die(const char* what, int rank, int call) {
  std::fprintf(stderr, "shm_threads: %s is wrong on rank %d in call %d\n", what, rank, call);
  std::_Exit(2);
}

// What rank `rank` brings to call `call` at place i: small integers, so that sums are exact.
float value(int rank, int call, size_t i) {
  return static_cast<float>((rank * 131 + call * 17 + static_cast<int>(i % 977) * 7) % 101 - 50);
}

std::vector<float> values(int rank, int call, size_t n) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) x[i] = value(rank, call, i);
  return x;
}

struct World {
  explicit World(int size) : size(size), groups(size), spaces(size), bits(size) {
    pthread_barrier_init(&barrier, nullptr, size);
  }
  ~World() { pthread_barrier_destroy(&barrier); }

  int size;
  std::vector<std::shared_ptr<Group>> groups;
  std::vector<std::unique_ptr<Workspace>> spaces;
  std::vector<std::vector<float>> bits;  // by rank: what must be equal on all
  pthread_barrier_t barrier;
};

class Rank {
 public:
  Rank(World* all, int rank, unsigned seed)
      : all_(*all), rank_(rank), world_(all->size), program_(seed), delays_(seed * 97 + rank + 1) {}

  void run(int calls) {
    join();
    mcp::shm::delays = &delays_;
    for (call_ = 1; call_ <= calls; ++call_) {
      n_ = program_() % 3000;
      root_ = static_cast<int>(program_() % world_);
      switch (program_() % 11) {
        case 0:
          all_reduce();
          break;
        case 1:
          reduce();
          break;
        case 2:
          reduce_scatter();
          break;
        case 3:
          all_gather();
          break;
        case 4:
          broadcast();
          break;
        case 5:
          all_to_all();
          break;
        case 6:
          scatter();
          break;
        case 7:
          gather();
          break;
        case 8:
          messages();
          break;
        case 9:
          sum_blocks();
          break;
        default:
          gather_pieces();
      }
      if (program_() % 8 == 0) group_->barrier();
    }
    mcp::shm::delays = nullptr;
    pthread_barrier_wait(&all_.barrier);  // nobody unmaps what another still reads
  }

 private:
  void join() {
    GroupConfig config;
    config.name = "threads";
    config.token = std::to_string(::getpid()) + "-" + std::to_string(world_) + "-g";
    config.token += std::to_string(rank_);
    config.rank = rank_;
    config.world = world_;
    config.slot_bytes = kSlotBytes;
    config.ring_bytes = kRingBytes;
    config.crowd = world_;
    config.timeout_s = 120;
    group_ = std::make_shared<Group>(config);
    all_.groups[rank_] = group_;
    config.token.back() += 32;
    space_ = new Workspace(group_, config.token + "w", kWorkspaceSlot);
    all_.spaces[rank_].reset(space_);
    pthread_barrier_wait(&all_.barrier);
    std::vector<Group*> groups;
    std::vector<Workspace*> spaces;
    for (int peer = 0; peer < world_; ++peer) {
      groups.push_back(all_.groups[peer].get());
      spaces.push_back(all_.spaces[peer].get());
    }
    group_->connect_threads(groups);
    pthread_barrier_wait(&all_.barrier);
    space_->connect_threads(spaces);
  }

  float sum(size_t i) const {
    float total = 0;
    for (int peer = 0; peer < world_; ++peer) total += value(peer, call_, i);
    return total;
  }

  void expect(bool holds, const char* what) const {
    if (!holds) die(what, rank_, call_);
  }

  void expect_sum(const std::vector<float>& out, size_t from, const char* what) const {
    for (size_t i = 0; i < out.size(); ++i) expect(out[i] == sum(from + i), what);
  }

  // Fractions, whose sum depends on the order: all ranks must have taken the same one.
  void expect_equal_bits(const std::vector<float>& out) {
    all_.bits[rank_] = out;
    pthread_barrier_wait(&all_.barrier);
    const std::vector<float>& first = all_.bits[0];
    expect(std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) == 0, "equal bits");
    pthread_barrier_wait(&all_.barrier);
  }

  void all_reduce() {
    std::vector<float> x = values(rank_, call_, n_), out(n_);
    group_->all_reduce(x.data(), out.data(), n_, Type::kFloat32, Reduction::kSum, false);
    expect_sum(out, 0, "all_reduce");
    for (float& f : x) f = f / 3 + 1e-3f;
    group_->all_reduce(x.data(), x.data(), n_, Type::kFloat32, Reduction::kSum, true);
    expect_equal_bits(x);
  }

  void reduce() {
    const std::vector<float> x = values(rank_, call_, n_);
    std::vector<float> out(rank_ == root_ ? n_ : 0);
    group_->reduce(x.data(), out.data(), n_, Type::kFloat32, Reduction::kSum, false, root_);
    expect_sum(out, 0, "reduce");
  }

  void reduce_scatter() {
    const std::vector<float> x = values(rank_, call_, n_ * world_);
    std::vector<float> out(n_);
    group_->reduce_scatter(x.data(), out.data(), n_, Type::kFloat32, Reduction::kSum, false);
    expect_sum(out, n_ * rank_, "reduce_scatter");
  }

  void all_gather() {
    const std::vector<float> x = values(rank_, call_, n_);
    std::vector<std::vector<float>> rows(world_, std::vector<float>(n_));
    group_->all_gather(x.data(), pointers(rows), n_ * sizeof(float));
    for (int peer = 0; peer < world_; ++peer) {
      expect(rows[peer] == values(peer, call_, n_), "all_gather");
    }
  }

  void broadcast() {
    std::vector<float> x = values(rank_, call_, n_);
    group_->broadcast(x.data(), n_ * sizeof(float), root_);
    expect(x == values(root_, call_, n_), "broadcast");
  }

  void all_to_all() {
    std::vector<std::vector<float>> in, out;
    std::vector<const void*> sources;
    std::vector<size_t> in_bytes, out_bytes;
    for (int peer = 0; peer < world_; ++peer) {
      const size_t sent = n_ * ((rank_ + 2 * peer) % 3), got = n_ * ((peer + 2 * rank_) % 3);
      in.push_back(values(rank_ * world_ + peer, call_, sent));
      out.emplace_back(got);
      in_bytes.push_back(sent * sizeof(float));
      out_bytes.push_back(got * sizeof(float));
    }
    for (const std::vector<float>& row : in) sources.push_back(row.data());
    group_->all_to_all(sources, in_bytes, pointers(out), out_bytes);
    for (int peer = 0; peer < world_; ++peer) {
      expect(out[peer] == values(peer * world_ + rank_, call_, out[peer].size()), "all_to_all");
    }
  }

  void scatter() {
    std::vector<std::vector<float>> rows;
    std::vector<const void*> sources;
    for (int peer = 0; rank_ == root_ && peer < world_; ++peer) {
      rows.push_back(values(peer, call_, n_));
    }
    for (const std::vector<float>& row : rows) sources.push_back(row.data());
    std::vector<float> out(n_);
    group_->scatter(sources, out.data(), n_ * sizeof(float), root_);
    expect(out == values(rank_, call_, n_), "scatter");
  }

  void gather() {
    const std::vector<float> x = values(rank_, call_, n_);
    std::vector<std::vector<float>> rows(rank_ == root_ ? world_ : 0, std::vector<float>(n_));
    group_->gather(x.data(), pointers(rows), n_ * sizeof(float), root_);
    for (size_t peer = 0; peer < rows.size(); ++peer) {
      expect(rows[peer] == values(static_cast<int>(peer), call_, n_), "gather");
    }
  }

  // To the next rank, from the one before, and back: two tags, received in the other order.
  void messages() {
    const int next = (rank_ + 1) % world_, last = (rank_ + world_ - 1) % world_;
    const size_t bytes = n_ * sizeof(float);
    const std::vector<float> a = values(rank_, call_, n_), b = values(rank_ + 50, call_, n_);
    std::vector<float> from_a(n_), from_b(n_);
    Mailbox& mailbox = group_->mailbox();
    const auto sent_a = mailbox.send(a.data(), bytes, next, 1);
    const auto sent_b = mailbox.send(b.data(), bytes, next, 2);
    const auto got_b = mailbox.receive(from_b.data(), bytes, last, 2);
    const auto got_a = mailbox.receive(from_a.data(), bytes, last, 1);
    mailbox.wait(got_b, 0);
    mailbox.wait(got_a, 0);
    mailbox.wait(sent_a, 0);
    mailbox.wait(sent_b, 0);
    expect(from_a == values(last, call_, n_), "tag 1");
    expect(from_b == values(last + 50, call_, n_), "tag 2");
  }

  // A matrix in blocks of 8 by 16, summed whole, in stages, or by parts of rows; a bias last.
  void sum_blocks() {
    constexpr size_t kRows = 8, kColumns = 16;
    const size_t rows = kRows * (1 + n_ % 5), columns = kColumns * (1 + n_ % 3);
    const int way = static_cast<int>(program_() % 3);
    const bool is_part = way == 2;
    const size_t part = is_part ? (rows + world_ - 1) / world_ : rows;
    const size_t first = is_part ? std::min(rows, part * rank_) : 0;
    const size_t count = is_part ? std::min(part, rows - first) : rows;
    std::vector<float> out(count * columns), bias = values(99, call_, columns);
    SumCall call{Op::kMatmulReduceScatter,
                 Type::kFloat32,
                 rows,
                 columns,
                 rows,
                 first,
                 count,
                 0,
                 columns,
                 reinterpret_cast<char*>(out.data()),
                 columns,
                 reinterpret_cast<const char*>(bias.data()),
                 way == 1};
    if (way == 1) call.bias = nullptr;
    int slot = space_->begin_sum(call);
    for (size_t row = 0; row < rows; row += kRows) {
      for (size_t column = 0; column < columns; column += kColumns) {
        if (row + column > 0) slot = space_->next_slot();
        float* const at = reinterpret_cast<float*>(space_->slots() + kWorkspaceSlot * slot);
        for (size_t i = 0; i < kRows * kColumns; ++i) {
          at[i] = value(rank_, call_, (row + i / kColumns) * columns + column + i % kColumns);
        }
        space_->publish_sum(row, kRows, column, kColumns);
      }
    }
    space_->finish();
    for (size_t i = 0; i < out.size(); ++i) {
      const float extra = call.bias == nullptr ? 0 : bias[i % columns];
      expect(out[i] == sum(first * columns + i) + extra, "sum of blocks");
    }
  }

  // Runs of unequal length, more pieces than slots at times; taken by rank where they all fit.
  void gather_pieces() {
    const size_t outer = 1 + n_ % 4;
    std::vector<size_t> runs;
    size_t pitch = 0, most = 0;
    for (int peer = 0; peer < world_; ++peer) {
      runs.push_back((n_ / 4 * ((peer + call_) % 3)) * sizeof(float));
      pitch += runs.back();
      most = std::max(most, runs.back());
    }
    const size_t pieces = (outer * most + kWorkspaceSlot - 1) / kWorkspaceSlot;
    if (pieces == 0) return;
    std::vector<float> out(outer * pitch / sizeof(float));
    const size_t mine = outer * runs[rank_];
    const std::vector<float> x = values(rank_, call_, mine / sizeof(float));
    int slot = space_->begin_gather({Op::kAllGatherMatmul, Type::kFloat32, outer, runs,
                                     reinterpret_cast<char*>(out.data()), pitch});
    for (size_t piece = 0; piece < pieces; ++piece) {
      if (piece > 0) slot = space_->next_slot();
      const size_t begin = std::min(mine, piece * kWorkspaceSlot);
      const size_t count = std::min(kWorkspaceSlot, mine - begin);
      const char* const from = reinterpret_cast<const char*>(x.data()) + begin;
      std::copy(from, from + count, space_->slots() + kWorkspaceSlot * slot);
      space_->publish_piece();
    }
    for (int distance = 0; pieces <= kDepth && distance < world_; ++distance) {
      space_->take((rank_ + distance) % world_);
    }
    space_->finish();
    size_t before = 0;
    for (int peer = 0; peer < world_; ++peer) {
      const size_t run = runs[peer] / sizeof(float);
      for (size_t i = 0; i < outer * run; ++i) {
        const size_t at = i / run * (pitch / sizeof(float)) + before + i % run;
        expect(out[at] == value(peer, call_, i), "gathered pieces");
      }
      before += run;
    }
  }

  static std::vector<void*> pointers(std::vector<std::vector<float>>& rows) {
    std::vector<void*> all;
    for (std::vector<float>& row : rows) all.push_back(row.data());
    return all;
  }

  World& all_;
  int rank_, world_;
  std::minstd_rand program_, delays_;
  std::shared_ptr<Group> group_;
  Workspace* space_ = nullptr;
  int call_ = 0;
  size_t n_ = 0;
  int root_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? std::atoi(argv[1]) : 1;
  const int calls = argc > 2 ? std::atoi(argv[2]) : 200;
  const int only = argc > 3 ? std::atoi(argv[3]) : 0;
  for (int size = only ? only : 2; size <= (only ? only : 8); ++size) {
    World world(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&world, rank, seed, calls] { Rank(&world, rank, seed).run(calls); });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%d ranks, %d calls: all held\n", size, calls);
  }
  return 0;
}
