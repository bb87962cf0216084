// The CUDA all-reduce on host threads: many calls of W ranks, each followed by a check of bits.
//
//   all_reduce <world> <form 0|1|2> <dtype f|b|h|d> <calls> <delay percent> <seed> [absent rank]
//
// Ranks run through the calls at their own pace, as streams do; sizes and grids change from call
// to call. Exit status: 0 right, 1 a wrong result. With an absent rank, 0 when the others time out
// and name it.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "threads.h"
// The words come first: the kernels are written in them.
#include "cuda/all_reduce.cuh"
#include "rank_data.h"

namespace {

using mcp::cuda::AllReduceForm;

struct Options {
  int world, form, calls, delay_percent, absent;
  unsigned seed;
};

constexpr int64_t kSlotBytes = 4096;

// The sum as the contract has it, by a loop of its own.
template <class T>
T expected_of(int world, int call, int64_t i) {
  decltype(mcp::cuda::widen_term(T{})) sum = 0;
  for (int rank = 0; rank < world; ++rank) {
    sum += mcp::cuda::widen_term(value_of<T>(rank, call, i));
  }
  T rounded;
  mcp::cuda::round_sum(sum, rounded);
  return rounded;
}

template <class T>
void run_kernel(const Options& options, const mcp::cuda::AllReduceArgs& args,
                const mcp::cuda::Channel& channel, const host::LaunchOptions& launch) {
  host::launch(launch, [&] {
    if (options.form == 0) mcp::cuda::all_reduce_kernel<T, AllReduceForm::kOneShot>(args, channel);
    if (options.form == 1) mcp::cuda::all_reduce_kernel<T, AllReduceForm::kTwoShot>(args, channel);
    if constexpr (sizeof(T) < 8) {
      if (options.form == 2) {
        mcp::cuda::all_reduce_kernel<T, AllReduceForm::kMulticast>(args, channel);
      }
    }
  });
}

// All calls of one rank. True when every result has the right bits.
template <class T>
bool run_rank(const Options& options, int rank, const std::vector<char*>& buffers,
              uint64_t* error) {
  const int64_t most = kSlotBytes / static_cast<int64_t>(sizeof(T));
  const int64_t timeout_ns = options.absent >= 0 ? 2'000'000'000 : 10'000'000'000;
  const mcp::cuda::Channel channel{buffers.data(), nullptr, error,        kSlotBytes,
                                   timeout_ns,     rank,    options.world};
  bool right = true;
  for (int call = 0; call < options.calls; ++call) {
    const int64_t numel = numel_of(call, most);
    const int64_t shift = call % 2;  // every other x starts between two units
    Buffer x((numel + shift) * sizeof(T), 0xff), y(numel * sizeof(T), 0xff);
    T* from = reinterpret_cast<T*>(x.bytes()) + shift;
    for (int64_t i = 0; i < numel; ++i) from[i] = value_of<T>(rank, call, i);
    const mcp::cuda::AllReduceArgs args{from, y.bytes(), numel, shift == 0};
    run_kernel<T>(options, args, channel,
                  {grid_of(call), 3, options.seed * 131u + rank * 17u + call, options.delay_percent,
                   &buffers});
    if (options.absent >= 0) {
      const T first = *reinterpret_cast<T*>(y.bytes());
      right &= std::isnan(static_cast<double>(mcp::cuda::widen_term(first)));
      continue;
    }
    for (int64_t i = 0; i < numel; ++i) {
      const T expected = expected_of<T>(options.world, call, i);
      if (std::memcmp(y.bytes() + i * sizeof(T), &expected, sizeof(T)) == 0) continue;
      std::fprintf(stderr, "rank %d call %d element %ld of %ld is wrong\n", rank, call, long(i),
                   long(numel));
      std::_Exit(1);  // the other ranks would wait for this one
    }
  }
  return right;
}

template <class T>
int run(const Options& options) {
  std::vector<std::unique_ptr<Buffer>> owned;
  std::vector<char*> buffers;
  for (int rank = 0; rank < options.world; ++rank) {
    owned.push_back(
        std::make_unique<Buffer>(mcp::cuda::slots_at(options.world) + 2 * kSlotBytes, 0));
    buffers.push_back(owned.back()->bytes());
  }
  std::vector<uint64_t> errors(options.world);
  std::vector<char> right(options.world, 1);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < options.world; ++rank) {
    if (rank == options.absent) continue;
    ranks.emplace_back(
        [&, rank] { right[rank] = run_rank<T>(options, rank, buffers, &errors[rank]); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < options.world; ++rank) {
    if (!right[rank]) return 1;
    const uint64_t wanted = options.absent < 0 || rank == options.absent
                                ? 0
                                : mcp::cuda::pack_error(0, options.absent, 1);
    if (errors[rank] == wanted) continue;
    std::fprintf(stderr, "rank %d: error word %lx, not %lx\n", rank, errors[rank], wanted);
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) return 2;
  const Options options{std::atoi(argv[1]),
                        std::atoi(argv[2]),
                        std::atoi(argv[4]),
                        std::atoi(argv[5]),
                        argc > 7 ? std::atoi(argv[7]) : -1,
                        static_cast<unsigned>(std::atoi(argv[6]))};
  switch (argv[3][0]) {
    case 'f':
      return run<float>(options);
    case 'b':
      return run<__nv_bfloat16>(options);
    case 'h':
      return run<__half>(options);
    case 'd':
      return run<double>(options);
  }
  return 2;
}
