// All-reduce by sum over the GPUs of one fabric, in one kernel.
//
//   y = x_0 + x_1 + ... + x_(W-1)       added in that order in float32 (float64 for float64),
//                                       rounded once: all ranks hold the same bits
//
// one-shot  x into the own slot; every rank reads all W slots.          reads (W-1) n from peers
// two-shot  x into the own slot; rank r adds part r of all slots, puts  reads 2 (W-1)/W n
//           the sum back into its slot; every rank reads all parts.
// multicast as two-shot; the switch adds and spreads part r             reads n/W, writes n/W
//
// Work is cut into units of 16 bytes. Block b of a rank does the same units as block b of each
// peer, so blocks of other numbers never meet (symmetric.cuh has the protocol).
//
// Source of the one-shot and two-shot forms: vLLM's custom all-reduce and DeepSpeed's, from their
// descriptions; the protocol is ours.
#pragma once

#include "cuda/units.cuh"

namespace mcp::cuda {

constexpr int kAllReduceThreads = 512;

struct AllReduceArgs {
  const void* x;   // [numel]
  void* y;         // [numel], 16-byte aligned; may be x
  int64_t numel;   // numel * sizeof(T) <= channel.slot_bytes
  bool x_aligned;  // x is 16-byte aligned
};

namespace {

// Units of the call, and of each of the W parts of two-shot.
template <class T>
struct Units {
  int64_t count;
  int64_t per_part;

  __device__ Units(int64_t numel, int world)
      : count((numel + Unit<T>::kSize - 1) / Unit<T>::kSize),
        per_part((count + world - 1) / world) {}

  __device__ int64_t of_part(int part) const {
    const int64_t left = count - part * per_part;
    return left < 0 ? 0 : left < per_part ? left : per_part;
  }
};

template <class T>
__device__ Unit<T> read_x(const AllReduceArgs& args, int64_t unit) {
  const int64_t at = unit * Unit<T>::kSize;
  return read_unit(static_cast<const T*>(args.x) + at, args.numel - at, args.x_aligned);
}

template <class T>
__device__ void write_y(const AllReduceArgs& args, int64_t unit, const Unit<T>& value) {
  const int64_t at = unit * Unit<T>::kSize;
  write_unit(static_cast<T*>(args.y) + at, args.numel - at, true, value);
}

// The sum of one unit over the ranks' slots, in rank order.
template <class T>
__device__ Unit<T> sum_over_ranks(const Call& call, int64_t unit) {
  using Wide = decltype(widen_term(T{}));
  Wide sum[Unit<T>::kSize] = {};
  for (int rank = 0; rank < call.channel.world; ++rank) {
    const Unit<T> part = slot_of<T>(call, rank)[unit];
#pragma unroll
    for (int i = 0; i < Unit<T>::kSize; ++i) sum[i] += widen_term(part.v[i]);
  }
  Unit<T> rounded;
#pragma unroll
  for (int i = 0; i < Unit<T>::kSize; ++i) round_sum(sum[i], rounded.v[i]);
  return rounded;
}

// What a block writes where a peer did not come: nobody takes it for a sum.
template <class T>
__device__ void poison(const AllReduceArgs& args, const Units<T>& units) {
  const Unit<T> bad = nan_unit<T>();
  for_share(units.count, [&](int64_t unit) { write_y<T>(args, unit, bad); });
}

template <class T>
__device__ bool one_shot(const AllReduceArgs& args, const Call& call, const Units<T>& units) {
  Unit<T>* own = slot_of<T>(call, call.channel.rank);
  for_share(units.count, [&](int64_t unit) { put(own + unit, read_x<T>(args, unit)); });
  call.publish(0);
  if (!call.wait(0)) return false;
  for_share(units.count,
            [&](int64_t unit) { write_y<T>(args, unit, sum_over_ranks<T>(call, unit)); });
  return true;
}

template <class T, bool kMulticast>
__device__ bool two_shot(const AllReduceArgs& args, const Call& call, const Units<T>& units) {
  const int rank = call.channel.rank, world = call.channel.world;
  Unit<T>* own = slot_of<T>(call, rank);
  for (int part = 0; part < world; ++part) {
    for_share(units.of_part(part), [&](int64_t i) {
      const int64_t unit = part * units.per_part + i;
      put(own + unit, read_x<T>(args, unit));
    });
  }
  if (kMulticast) fence_aliases();
  call.publish(0);
  if (!call.wait(0)) return false;
  if (kMulticast) fence_aliases();
  // Nobody but this rank reads part `rank` of its slot before the second flag.
  for_share(units.of_part(rank), [&](int64_t i) {
    const int64_t unit = rank * units.per_part + i;
    if constexpr (kMulticast) {
      char* at = call.channel.multicast + call.slot_at() + unit * 16;
      multicast_store(at, multicast_sum<T>(at));
    } else {
      const Unit<T> sum = sum_over_ranks<T>(call, unit);
      put(own + unit, sum);
      write_y<T>(args, unit, sum);
    }
  });
  if (kMulticast) fence_aliases();
  call.publish(1);
  if (!call.wait(1)) return false;
  if (kMulticast) fence_aliases();
  for (int step = kMulticast ? 0 : 1; step < world; ++step) {
    const int part = (rank + step) % world;  // ranks start at different peers
    const Unit<T>* from = slot_of<T>(call, kMulticast ? rank : part);
    for_share(units.of_part(part), [&](int64_t i) {
      const int64_t unit = part * units.per_part + i;
      write_y<T>(args, unit, from[unit]);
    });
  }
  return true;
}

enum class AllReduceForm { kOneShot, kTwoShot, kMulticast };

template <class T, AllReduceForm kForm>
__global__ void __launch_bounds__(kAllReduceThreads)
    all_reduce_kernel(AllReduceArgs args, Channel channel) {
  const Call call(channel);
  const Units<T> units(args.numel, channel.world);
  bool ok = !call.is_dead();
  if (ok) {
    if constexpr (kForm == AllReduceForm::kOneShot) {
      ok = one_shot<T>(args, call, units);
    } else {
      ok = two_shot<T, kForm == AllReduceForm::kMulticast>(args, call, units);
    }
  }
  if (!ok) poison<T>(args, units);
  call.finish();
}

}  // namespace
}  // namespace mcp::cuda
