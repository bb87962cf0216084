// The torch side of flash_attn on CPU: check, allocate, pick the instruction set, register.
#include "cpu/flash_attn.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "common/check.h"
#include "common/isa.h"
#include "common/target.h"
#include "cpu/flash_attn_run.h"

namespace mcp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  double softmax_scale;
  int64_t window_left, window_right;
  bool top_left;
  double softcap, dropout_p;
};

AttnType attn_type(const char* op, const char* name, const Tensor& x) {
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

const FlashAttnBody& pick_body(AttnType type) {
#if MCP_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512) return avx512::flash_attn_body(type);
  if (isa >= Isa::kAvx2) return avx2::flash_attn_body(type);
#endif
  return scalar::flash_attn_body(type);
}

FlashAttnThreads torch_threads() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t count, const std::function<void(int64_t)>& work) {
            torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
              for (int64_t i = first; i < last; ++i) work(i);
            });
          }};
}

ScalarType sum_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

void check_rank_and_type(const char* op, const char* name, const Tensor& x, int64_t rank,
                         ScalarType type) {
  STD_TORCH_CHECK(x.dim() == rank, op, ": ", name, " must have ", rank, " dimensions, got ",
                  x.dim());
  STD_TORCH_CHECK(x.is_cpu(), op, ": ", name, " must be on cpu as q is");
  check_dtype(op, name, x, type);
}

void check_size(const char* op, const char* name, const Tensor& x, int64_t dim, int64_t expected) {
  STD_TORCH_CHECK(x.size(dim) == expected, op, ": ", name, " must be ", expected, " in dimension ",
                  dim, ", got ", x.size(dim));
}

// [..., S, H, D] with strides in elements.
AttnTensor attn_tensor(const Tensor& x) {
  const int64_t rank = x.dim();
  return {x.const_data_ptr(), x.stride(rank - 3), x.stride(rank - 2), x.stride(rank - 1)};
}

// A small tensor as contiguous values of one type, whatever it was.
Tensor values_of(const Tensor& x, ScalarType type) {
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

void set_heads(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
               FlashAttnArgs& args) {
  const int64_t rank = q.dim();
  check_rank_and_type(op, "k", k, rank, q.scalar_type());
  check_rank_and_type(op, "v", v, rank, q.scalar_type());
  args.type = attn_type(op, "q", q);
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
  args.q = attn_tensor(q);
  args.k = attn_tensor(k);
  args.v = attn_tensor(v);
}

void set_options(const char* op, const Options& options, FlashAttnArgs& args) {
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
void set_row_terms(const char* op, const OptionalTensor& slopes, const OptionalTensor& sink,
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

void set_bias(const char* op, const Tensor& bias, const int64_t (&full)[4], FlashAttnArgs& args) {
  STD_TORCH_CHECK(bias.dim() == 4 && bias.is_cpu(), op, ": bias must have 4 dimensions, on cpu");
  int64_t strides[4];
  for (int dim = 0; dim < 4; ++dim) {
    STD_TORCH_CHECK(bias.size(dim) == full[dim] || bias.size(dim) == 1, op, ": bias must be 1 or ",
                    full[dim], " in dimension ", dim, ", got ", bias.size(dim));
    strides[dim] = bias.size(dim) == 1 ? 0 : bias.stride(dim);
  }
  args.bias = {bias.const_data_ptr(),
               attn_type(op, "bias", bias),
               strides[0],
               strides[1],
               strides[2],
               strides[3]};
}

// Batch entries of [B, S, H, D] tensors.
void set_batch(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
               const OptionalTensor& bias, Call& call) {
  check_rank_and_type(op, "q", q, 4, q.scalar_type());
  set_heads(op, q, k, v, call.args);
  const int64_t batch = q.size(0), rows = q.size(1), keys = k.size(1);
  check_size(op, "k", k, 0, batch);
  check_size(op, "v", v, 0, batch);
  for (int64_t b = 0; b < batch; ++b) {
    call.sequences.push_back({rows, keys, b * rows, b * keys, b * q.stride(0), b * k.stride(0),
                              b * v.stride(0), 0, b * call.args.heads * rows, b});
  }
  call.args.lse_head = rows;
  call.args.sequences = call.sequences.data();
  call.args.num_sequences = batch;
  if (bias) set_bias(op, *bias, {batch, call.args.heads, rows, keys}, call.args);
}

std::tuple<Tensor, Tensor> flash_attn(Tensor q, Tensor k, Tensor v, OptionalTensor bias,
                                      OptionalTensor alibi_slopes, OptionalTensor sink,
                                      OptionalTensor rng, double softmax_scale, int64_t window_left,
                                      int64_t window_right, bool top_left, double softcap,
                                      double dropout_p) {
  constexpr const char* kOp = "flash_attn";
  Call call;
  set_batch(kOp, q, k, v, bias, call);
  set_options(kOp, {softmax_scale, window_left, window_right, top_left, softcap, dropout_p},
              call.args);
  set_row_terms(kOp, alibi_slopes, sink, rng, dropout_p, call);
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, sum_type(q));
  if (lse.numel() == 0) return {out, lse};
  call.args.out = out.mutable_data_ptr();
  call.args.lse = lse.mutable_data_ptr();
  run_flash_attn(call.args, pick_body(call.args.type), torch_threads());
  return {out, lse};
}

// dbias of the scalars that sums run in, with the strides by which tasks add to it.
Tensor make_dbias(const Tensor& q, const Tensor& bias, FlashAttnArgs& args) {
  const int64_t sizes[4] = {bias.size(0), bias.size(1), bias.size(2), bias.size(3)};
  const int64_t full[4] = {q.size(0), q.size(2), q.size(1), args.sequences[0].num_keys};
  Tensor dbias = torch::stable::new_zeros(q, {sizes[0], sizes[1], sizes[2], sizes[3]}, sum_type(q));
  int64_t strides[4];
  for (int dim = 0; dim < 4; ++dim) {
    strides[dim] = sizes[dim] == 1 && full[dim] > 1 ? 0 : dbias.stride(dim);
  }
  args.dbias = dbias.mutable_data_ptr();
  args.dbias_strides = {args.dbias, args.type, strides[0], strides[1], strides[2], strides[3]};
  return dbias;
}

// dsink [H] of sink's type: the heads of all sequences, added in order.
Tensor sum_dsink(const std::vector<double>& of_head, const Tensor& q, const Tensor& sink) {
  const int64_t heads = sink.numel();
  Tensor sums = torch::stable::new_zeros(q, {heads}, ScalarType::Double);
  double* to = static_cast<double*>(sums.mutable_data_ptr());
  for (size_t i = 0; i < of_head.size(); ++i) to[i % heads] += of_head[i];
  return sink.scalar_type() == ScalarType::Double ? sums
                                                  : torch::stable::to(sums, sink.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attn_bwd(
    Tensor dout, OptionalTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
    OptionalTensor bias, OptionalTensor alibi_slopes, OptionalTensor sink, OptionalTensor rng,
    bool needs_dbias, double softmax_scale, int64_t window_left, int64_t window_right,
    bool top_left, double softcap, double dropout_p) {
  constexpr const char* kOp = "flash_attn_bwd";
  Call call;
  FlashAttnArgs& args = call.args;
  set_batch(kOp, q, k, v, bias, call);
  set_options(kOp, {softmax_scale, window_left, window_right, top_left, softcap, dropout_p}, args);
  set_row_terms(kOp, alibi_slopes, sink, rng, dropout_p, call);
  check_rank_and_type(kOp, "dout", dout, 4, q.scalar_type());
  check_rank_and_type(kOp, "out", out, 4, q.scalar_type());
  check_rank_and_type(kOp, "lse", lse, 3, sum_type(q));
  for (int dim = 0; dim < 3; ++dim) check_size(kOp, "dout", dout, dim, q.size(dim));
  check_size(kOp, "dout", dout, 3, v.size(3));
  check_numel(kOp, "out", out, dout.numel());
  check_numel(kOp, "lse", lse, q.size(0) * q.size(1) * q.size(2));
  args.dout = attn_tensor(dout);
  for (AttnSequence& seq : call.sequences) seq.dout = seq.batch * dout.stride(0);
  args.out = const_cast<void*>(call.keep(torch::stable::contiguous(out)));
  args.lse = const_cast<void*>(call.keep(torch::stable::contiguous(lse)));
  if (dlse) {
    check_numel(kOp, "dlse", *dlse, lse.numel());
    args.dlse = call.keep(values_of(*dlse, sum_type(q)));
  }
  Tensor dbias = torch::stable::new_empty(q, {0}), dsink = torch::stable::new_empty(q, {0});
  if (q.size(0) > 0 && needs_dbias) dbias = make_dbias(q, *bias, args);
  std::vector<double> dsink_of_head(sink ? args.num_sequences * args.heads : 0);
  args.dsink_of_head = dsink_of_head.data();
  // Without a query head nothing is visited; else every element is written.
  const auto make = [&](const Tensor& x) {
    const auto sizes = {x.size(0), x.size(1), x.size(2), x.size(3)};
    return args.heads == 0 ? torch::stable::new_zeros(x, sizes)
                           : torch::stable::new_empty(x, sizes);
  };
  Tensor dq = make(q), dk = make(k), dv = make(v);
  args.dq = dq.mutable_data_ptr();
  args.dk = dk.mutable_data_ptr();
  args.dv = dv.mutable_data_ptr();
  if (args.heads > 0) run_flash_attn_bwd(args, pick_body(args.type), torch_threads());
  if (sink) dsink = sum_dsink(dsink_of_head, q, *sink);
  if (needs_dbias && q.size(0) > 0) {
    dbias = bias->scalar_type() == dbias.scalar_type()
                ? dbias
                : torch::stable::to(dbias, bias->scalar_type());
  }
  return {dq, dk, dv, dbias, dsink};
}

}  // namespace
}  // namespace mcp

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("flash_attn", TORCH_BOX(&mcp::flash_attn));
  m.impl("flash_attn_bwd", TORCH_BOX(&mcp::flash_attn_bwd));
}
