// Attention calls as torch makes them, turned into what the bodies take: checks, strides, options.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/isa.h"
#include "common/target.h"
#include "cpu/flash_attn.h"
#include "cpu/flash_attn_run.h"

namespace mcp::attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  double softmax_scale;
  int64_t window_left, window_right;
  bool top_left;
  double softcap, dropout_p;
};

inline AttnType attn_type(const char* op, const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double:
      return AttnType::kFloat64;
    case ScalarType::Float:
      return AttnType::kFloat32;
    case ScalarType::BFloat16:
      return AttnType::kBFloat16;
    case ScalarType::Half:
      return AttnType::kFloat16;
    case ScalarType::Bool:
      return AttnType::kBool;
    default:
      STD_TORCH_CHECK(false, op, ": ", name, " must be float64, float32, bfloat16 or float16",
                      ", got dtype code ", static_cast<int>(x.scalar_type()));
  }
}

inline const FlashAttnBody& pick_body(AttnType type) {
#if MCP_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512Bf16 && type == AttnType::kBFloat16) return avx512_bf16::flash_attn_body();
  if (isa >= Isa::kAvx512) return avx512::flash_attn_body(type);
  if (isa >= Isa::kAvx2) return avx2::flash_attn_body(type);
#endif
  return scalar::flash_attn_body(type);
}

inline FlashAttnThreads torch_threads() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t count, const std::function<void(int64_t)>& work) {
            torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
              for (int64_t i = first; i < last; ++i) work(i);
            });
          }};
}

inline ScalarType sum_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_rank_and_type(const char* op, const char* name, const Tensor& x, int64_t rank,
                                ScalarType type) {
  STD_TORCH_CHECK(x.dim() == rank, op, ": ", name, " must have ", rank, " dimensions, got ",
                  x.dim());
  STD_TORCH_CHECK(x.is_cpu(), op, ": ", name, " must be on cpu as q is");
  check_dtype(op, name, x, type);
}

inline void check_size(const char* op, const char* name, const Tensor& x, int64_t dim,
                       int64_t expected) {
  STD_TORCH_CHECK(x.size(dim) == expected, op, ": ", name, " must be ", expected, " in dimension ",
                  dim, ", got ", x.size(dim));
}

// [..., S, H, D] with strides in elements.
inline AttnTensor attn_tensor(const Tensor& x) {
  const int64_t rank = x.dim();
  return {x.const_data_ptr(), x.stride(rank - 3), x.stride(rank - 2), x.stride(rank - 1)};
}

// A small tensor as contiguous values of one type, whatever it was.
inline Tensor values_of(const Tensor& x, ScalarType type) {
  return torch::stable::contiguous(x.scalar_type() == type ? x : torch::stable::to(x, type));
}

// What a call needs besides its tensors, kept alive while it runs.
struct Call {
  FlashAttnArgs args{};
  std::vector<AttnSequence> sequences;
  std::vector<Tensor> kept;

  const void* keep(Tensor x) {
    kept.push_back(std::move(x));
    return kept.back().const_data_ptr();
  }
};

inline void set_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                      FlashAttnArgs& args) {
  const int64_t rank = q.dim();
  check_rank_and_type(op, "k", k, rank, q.scalar_type());
  check_rank_and_type(op, "v", v, rank, q.scalar_type());
  args.type = attn_type(op, "q", q);
  STD_TORCH_CHECK(args.type != AttnType::kBool, op,
                  ": q must be float64, float32, bfloat16 or float16, got bool");
  args.heads = q.size(rank - 2);
  args.kv_heads = k.size(rank - 2);
  args.head_dim = q.size(rank - 1);
  args.value_dim = v.size(rank - 1);
  check_size(op, "k", k, rank - 1, args.head_dim);
  check_size(op, "v", v, rank - 2, args.kv_heads);
  check_size(op, "v", v, rank - 3, k.size(rank - 3));
  STD_TORCH_CHECK(args.heads == 0 || (args.kv_heads > 0 && args.heads % args.kv_heads == 0), op,
                  ": query heads must be a multiple of KV heads, got ", args.heads,
                  " query heads and ", args.kv_heads, " KV heads");
  constexpr int64_t kLongest = int64_t{1} << 31;
  STD_TORCH_CHECK(q.size(rank - 3) < kLongest && k.size(rank - 3) < kLongest, op,
                  ": q and k must be shorter than 2^31 rows, got ", q.size(rank - 3), " and ",
                  k.size(rank - 3));
  args.q = attn_tensor(q);
  args.k = attn_tensor(k);
  args.v = attn_tensor(v);
}

inline void set_options(const char* op, const Options& options, FlashAttnArgs& args) {
  // Wider than any sequence, narrow enough that sums with positions cannot overflow.
  constexpr int64_t kWidest = int64_t{1} << 40;
  STD_TORCH_CHECK(options.dropout_p >= 0 && options.dropout_p <= 1, op,
                  ": dropout_p must be in [0, 1], got ", options.dropout_p);
  args.scale = options.softmax_scale;
  args.window_left = std::min(options.window_left, kWidest);
  args.window_right = std::min(options.window_right, kWidest);
  args.top_left = options.top_left;
  args.softcap = options.softcap;
}

// Slopes, sink and random numbers; `batch` and `heads` as the call has them.
inline void set_row_terms(const char* op, const OptionalTensor& slopes, const OptionalTensor& sink,
                          const OptionalTensor& rng, double dropout_p, Call& call) {
  FlashAttnArgs& args = call.args;
  if (slopes) {
    STD_TORCH_CHECK(slopes->dim() == 2 && slopes->size(1) == args.heads &&
                        (slopes->size(0) == 1 || slopes->size(0) == args.num_sequences),
                    op, ": alibi_slopes must be [1 or B, H]");
    args.slopes_batch = slopes->size(0) == 1 ? 0 : args.heads;
    args.slopes = static_cast<const double*>(call.keep(values_of(*slopes, ScalarType::Double)));
  }
  if (sink) {
    check_numel(op, "sink", *sink, args.heads);
    args.sink = static_cast<const double*>(call.keep(values_of(*sink, ScalarType::Double)));
  }
  if (rng) {
    check_numel(op, "rng", *rng, 2);
    const auto* words = static_cast<const int64_t*>(call.keep(values_of(*rng, ScalarType::Long)));
    args.seed = static_cast<uint64_t>(words[0]);
    args.offset = static_cast<uint64_t>(words[1]);
    args.dropout_p = dropout_p;
  }
}

// What a backward call adds: dout, dlse and the results of forward.
inline void set_results(const char* op, const Tensor& dout, const OptionalTensor& dlse,
                        const OptionalTensor& delta, const Tensor& q, const Tensor& v,
                        const Tensor& out, const Tensor& lse, Call& call) {
  FlashAttnArgs& args = call.args;
  const int64_t rank = q.dim();
  check_rank_and_type(op, "dout", dout, rank, q.scalar_type());
  check_rank_and_type(op, "out", out, rank, q.scalar_type());
  check_rank_and_type(op, "lse", lse, rank - 1, sum_type(q));
  for (int64_t dim = 0; dim + 1 < rank; ++dim) check_size(op, "dout", dout, dim, q.size(dim));
  check_size(op, "dout", dout, rank - 1, v.size(rank - 1));
  check_numel(op, "out", out, dout.numel());
  int64_t num_rows = 1;
  for (int64_t dim = 0; dim + 1 < rank; ++dim) num_rows *= q.size(dim);
  check_numel(op, "lse", lse, num_rows);
  args.dout = attn_tensor(dout);
  args.out = const_cast<void*>(call.keep(torch::stable::contiguous(out)));
  args.lse = const_cast<void*>(call.keep(torch::stable::contiguous(lse)));
  if (dlse) {
    check_numel(op, "dlse", *dlse, lse.numel());
    args.dlse = call.keep(values_of(*dlse, sum_type(q)));
  }
  if (delta) {
    check_numel(op, "delta", *delta, lse.numel());
    args.delta = call.keep(values_of(*delta, sum_type(q)));
  }
}

// A result that the body fills, or all zeros where there are places that it does not visit.
inline Tensor make_result(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                          bool has_unvisited) {
  return has_unvisited ? torch::stable::new_zeros(like, sizes)
                       : torch::stable::new_empty(like, sizes);
}

// dsink [H] of sink's type: the heads of all sequences, added in order; empty without a sink.
inline Tensor sum_dsink(const std::vector<double>& of_head, const Tensor& q,
                        const OptionalTensor& sink) {
  if (!sink) return torch::stable::new_empty(q, {0});
  const int64_t heads = sink->numel();
  Tensor sums = torch::stable::new_zeros(q, {heads}, ScalarType::Double);
  double* to = static_cast<double*>(sums.mutable_data_ptr());
  for (size_t i = 0; i < of_head.size(); ++i) to[static_cast<int64_t>(i) % heads] += of_head[i];
  return sink->scalar_type() == ScalarType::Double ? sums
                                                   : torch::stable::to(sums, sink->scalar_type());
}

}  // namespace mcp::attn
