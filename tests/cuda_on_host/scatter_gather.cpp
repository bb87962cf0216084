// The CUDA reduce-scatter and all-gather on host threads: many calls of W ranks, each followed by a
// check of bits.
//
//   scatter_gather <world> <op s|g|m> <dtype f|b|h|d> <calls> <delay percent> <seed> [absent rank]
//
// "m" takes both by turns on one channel. Ranks run through the calls at their own pace; sizes,
// grids and alignment change from call to call. Exit status: 0 right, 1 a wrong result. With an
// absent rank, 0 when the others time out and name it.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "threads.h"
// The words come first: the kernels are written in them.
#include "cuda/scatter_gather.cuh"
#include "rank_data.h"

namespace {

struct Options {
  int world;
  char op;
  int calls, delay_percent, absent;
  unsigned seed;
};

constexpr int64_t kSlotBytes = 8192;

bool is_scatter(const Options& options, int call) {
  return options.op == 's' || (options.op == 'm' && call % 2 == 0);
}

// Element i of what rank `from` has for rank `to`; one row for the gather.
template <class T>
T element_of(int from, int to, int call, int64_t i) {
  return value_of<T>(from, call, 100003 * to + i);
}

template <class T>
T expected_of(const Options& options, int rank, int row, int call, int64_t i) {
  if (!is_scatter(options, call)) return element_of<T>(row, 0, call, i);
  decltype(mcp::cuda::widen_term(T{})) sum = 0;
  for (int from = 0; from < options.world; ++from) {
    sum += mcp::cuda::widen_term(element_of<T>(from, rank, call, i));
  }
  T rounded;
  mcp::cuda::round_sum(sum, rounded);
  return rounded;
}

template <class T>
bool run_call(const Options& options, int rank, int call, const mcp::cuda::Channel& channel) {
  const bool scatters = is_scatter(options, call);
  const int rows_x = scatters ? options.world : 1, rows_y = scatters ? 1 : options.world;
  const int64_t units = kSlotBytes / 16 / rows_x;
  const int64_t n = numel_of(call, units * mcp::cuda::Unit<T>::kSize);
  const int64_t shift = call % 2, pitch = n + call % 3;
  Buffer x((rows_x * pitch + shift) * sizeof(T), 0xff), y(rows_y * pitch * sizeof(T), 0xff);
  T* from = reinterpret_cast<T*>(x.bytes()) + shift;
  const T* to = reinterpret_cast<const T*>(y.bytes());
  for (int row = 0; row < rows_x; ++row) {
    for (int64_t i = 0; i < n; ++i) from[row * pitch + i] = element_of<T>(rank, row, call, i);
  }
  const bool is_whole = pitch * sizeof(T) % 16 == 0;
  const mcp::cuda::RowsArgs args{from, y.bytes(), n, pitch, is_whole && shift == 0, is_whole};
  host::launch({grid_of(call), 3, options.seed * 131u + rank * 17u + call, options.delay_percent},
               [&] {
                 if (scatters) {
                   mcp::cuda::reduce_scatter_kernel<T>(args, channel);
                 } else {
                   mcp::cuda::all_gather_kernel<T>(args, channel);
                 }
               });
  if (options.absent >= 0) {
    return std::isnan(static_cast<double>(mcp::cuda::widen_term(to[0])));
  }
  for (int row = 0; row < rows_y; ++row) {
    for (int64_t i = 0; i < n; ++i) {
      const T expected = expected_of<T>(options, rank, row, call, i);
      if (std::memcmp(to + row * pitch + i, &expected, sizeof(T)) == 0) continue;
      std::fprintf(stderr, "rank %d call %d row %d element %ld of %ld is wrong\n", rank, call, row,
                   long(i), long(n));
      std::_Exit(1);  // the other ranks would wait for this one
    }
  }
  return true;
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
    ranks.emplace_back([&, rank] {
      const int64_t timeout_ns = options.absent >= 0 ? 2'000'000'000 : 10'000'000'000;
      const mcp::cuda::Channel channel{buffers.data(), nullptr, &errors[rank], kSlotBytes,
                                       timeout_ns,     rank,    options.world};
      for (int call = 0; call < options.calls; ++call) {
        right[rank] &= run_call<T>(options, rank, call, channel);
      }
    });
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
                        argv[2][0],
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
