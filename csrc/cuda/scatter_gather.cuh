// Reduce-scatter by sum and all-gather over the GPUs of one fabric, in one kernel each.
//
//   reduce-scatter   y = x_0[r] + x_1[r] + ... + x_(W-1)[r] on rank r, added in that order in
//                    float32 (float64 for float64), rounded once       reads (W-1) n from peers
//   all-gather       y[p] = x_p on every rank                          reads (W-1) n from peers
//
// A rank puts what its peers read into its slot, raises its flags, waits for theirs, and reads.
// What it needs of itself it takes from x. Work is cut into units of 16 bytes of a row; block b of
// a rank does the same units of every row as block b of each peer (symmetric.cuh has the protocol).
#pragma once

#include "cuda/units.cuh"

namespace mcp::cuda {

constexpr int kScatterThreads = 512;

// n elements of each rank: rows of x for the reduce-scatter, of y for the all-gather.
struct RowsArgs {
  const void* x;   // reduce-scatter [world, n], rows `pitch` apart; all-gather [n]
  void* y;         // reduce-scatter [n]; all-gather [world, n], rows `pitch` apart
  int64_t n;       // world * ceil(n, unit) units <= channel.slot_bytes; one row for the all-gather
  int64_t pitch;   // elements
  bool x_aligned;  // every row of x is 16-byte aligned
  bool y_aligned;  // every row of y is
};

namespace {

template <class T>
struct Rows {
  const RowsArgs& args;
  int64_t units;  // of a row

  __device__ explicit Rows(const RowsArgs& a)
      : args(a), units((a.n + Unit<T>::kSize - 1) / Unit<T>::kSize) {}

  __device__ Unit<T> read(int row, int64_t unit) const {
    const int64_t at = unit * Unit<T>::kSize;
    const T* x = static_cast<const T*>(args.x) + row * args.pitch + at;
    return read_unit(x, args.n - at, args.x_aligned);
  }

  __device__ void write(int row, int64_t unit, const Unit<T>& value) const {
    const int64_t at = unit * Unit<T>::kSize;
    T* y = static_cast<T*>(args.y) + row * args.pitch + at;
    write_unit(y, args.n - at, args.y_aligned, value);
  }
};

template <class T>
__device__ bool reduce_scatter(const Call& call, const Rows<T>& rows) {
  using Wide = decltype(widen_term(T{}));
  const int rank = call.channel.rank, world = call.channel.world;
  Unit<T>* own = slot_of<T>(call, rank);
  for (int step = 1; step < world; ++step) {
    const int peer = (rank + step) % world;
    for_share(rows.units,
              [&](int64_t unit) { put(own + peer * rows.units + unit, rows.read(peer, unit)); });
  }
  call.publish(0);
  if (!call.wait(0)) return false;
  for_share(rows.units, [&](int64_t unit) {
    Wide sum[Unit<T>::kSize] = {};
    for (int peer = 0; peer < world; ++peer) {
      const Unit<T> term =
          peer == rank ? rows.read(rank, unit) : slot_of<T>(call, peer)[rank * rows.units + unit];
#pragma unroll
      for (int i = 0; i < Unit<T>::kSize; ++i) sum[i] += widen_term(term.v[i]);
    }
    Unit<T> rounded;
#pragma unroll
    for (int i = 0; i < Unit<T>::kSize; ++i) round_sum(sum[i], rounded.v[i]);
    rows.write(0, unit, rounded);
  });
  return true;
}

template <class T>
__device__ bool all_gather(const Call& call, const Rows<T>& rows) {
  const int rank = call.channel.rank, world = call.channel.world;
  Unit<T>* own = slot_of<T>(call, rank);
  for_share(rows.units, [&](int64_t unit) {
    const Unit<T> mine = rows.read(0, unit);
    put(own + unit, mine);
    rows.write(rank, unit, mine);
  });
  call.publish(0);
  if (!call.wait(0)) return false;
  for (int step = 1; step < world; ++step) {
    const int peer = (rank + step) % world;  // ranks start at different peers
    const Unit<T>* from = slot_of<T>(call, peer);
    for_share(rows.units, [&](int64_t unit) { rows.write(peer, unit, from[unit]); });
  }
  return true;
}

template <class T>
__global__ void __launch_bounds__(kScatterThreads)
    reduce_scatter_kernel(RowsArgs args, Channel channel) {
  const Call call(channel);
  const Rows<T> rows(args);
  if (call.is_dead() || !reduce_scatter<T>(call, rows)) {
    const Unit<T> bad = nan_unit<T>();
    for_share(rows.units, [&](int64_t unit) { rows.write(0, unit, bad); });
  }
  call.finish();
}

template <class T>
__global__ void __launch_bounds__(kScatterThreads)
    all_gather_kernel(RowsArgs args, Channel channel) {
  const Call call(channel);
  const Rows<T> rows(args);
  if (call.is_dead() || !all_gather<T>(call, rows)) {
    const Unit<T> bad = nan_unit<T>();
    for (int row = 0; row < channel.world; ++row) {
      for_share(rows.units, [&](int64_t unit) { rows.write(row, unit, bad); });
    }
  }
  call.finish();
}

}  // namespace
}  // namespace mcp::cuda
