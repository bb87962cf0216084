// flash_attn_varlen and its backward on CPU: sequences laid end to end, [T, H, D].
#include <limits>

#include "cpu/flash_attn_call.h"

namespace mcp::attn {
namespace {

// The ends of sequences as int64: from 0, never falling, within `total`.
std::vector<int64_t> ends_of(const char* op, const char* name, const Tensor& cu_seqlens,
                             int64_t total) {
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0 && cu_seqlens.is_cpu(), op, ": ",
                  name, " must be [B + 1], on cpu");
  const Tensor values = values_of(cu_seqlens, ScalarType::Long);
  const auto* first = static_cast<const int64_t*>(values.const_data_ptr());
  std::vector<int64_t> ends(first, first + values.numel());
  STD_TORCH_CHECK(ends.front() == 0 && std::is_sorted(ends.begin(), ends.end()), op, ": ", name,
                  " must start at 0 and never fall");
  STD_TORCH_CHECK(ends.back() <= total, op, ": ", name, " must end within the ", total,
                  " rows given, got ", ends.back());
  return ends;
}

// Rows that belong to a sequence, of q and of k.
struct Used {
  int64_t rows, keys;
};

Used set_sequences(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, Call& call) {
  check_rank_and_type(op, "q", q, 3, q.scalar_type());
  set_heads(op, q, k, v, call.args);
  const std::vector<int64_t> rows = ends_of(op, "cu_seqlens_q", cu_seqlens_q, q.size(0));
  const std::vector<int64_t> keys = ends_of(op, "cu_seqlens_k", cu_seqlens_k, k.size(0));
  STD_TORCH_CHECK(rows.size() == keys.size(), op, ": cu_seqlens_q and cu_seqlens_k must be of one",
                  " length, got ", rows.size(), " and ", keys.size());
  for (size_t b = 0; b + 1 < rows.size(); ++b) {
    call.sequences.push_back({rows[b + 1] - rows[b], keys[b + 1] - keys[b], rows[b], keys[b],
                              rows[b] * q.stride(0), keys[b] * k.stride(0), keys[b] * v.stride(0),
                              0, rows[b], static_cast<int64_t>(b)});
  }
  call.args.lse_head = q.size(0);
  call.args.sequences = call.sequences.data();
  call.args.num_sequences = static_cast<int64_t>(call.sequences.size());
  return {rows.back(), keys.back()};
}

template <class T>
void clear_lse(Tensor& lse, int64_t heads, int64_t total, int64_t used) {
  T* data = static_cast<T*>(lse.mutable_data_ptr());
  for (int64_t h = 0; h < heads; ++h) {
    std::fill(data + h * total + used, data + (h + 1) * total, -std::numeric_limits<T>::infinity());
  }
}

std::tuple<Tensor, Tensor> flash_attn_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,
                                             Tensor cu_seqlens_k, OptionalTensor alibi_slopes,
                                             OptionalTensor sink, OptionalTensor rng,
                                             double softmax_scale, int64_t window_left,
                                             int64_t window_right, bool top_left, double softcap,
                                             double dropout_p) {
  constexpr const char* kOp = "flash_attn_varlen";
  Call call;
  FlashAttnArgs& args = call.args;
  const Used used = set_sequences(kOp, q, k, v, cu_seqlens_q, cu_seqlens_k, call);
  set_options(kOp, {softmax_scale, window_left, window_right, top_left, softcap, dropout_p}, args);
  set_row_terms(kOp, alibi_slopes, sink, rng, dropout_p, call);
  const int64_t total = q.size(0);
  Tensor out = make_result(q, {total, args.heads, args.value_dim}, used.rows < total);
  Tensor lse = torch::stable::new_empty(q, {args.heads, total}, sum_type(q));
  if (lse.numel() == 0) return {out, lse};
  if (args.type == AttnType::kFloat64) {
    clear_lse<double>(lse, args.heads, total, used.rows);
  } else {
    clear_lse<float>(lse, args.heads, total, used.rows);
  }
  args.out = out.mutable_data_ptr();
  args.lse = lse.mutable_data_ptr();
  run_flash_attn(args, pick_body(args.type), torch_threads());
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> flash_attn_varlen_bwd(
    Tensor dout, OptionalTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
    Tensor cu_seqlens_q, Tensor cu_seqlens_k, OptionalTensor alibi_slopes, OptionalTensor sink,
    OptionalTensor rng, double softmax_scale, int64_t window_left, int64_t window_right,
    bool top_left, double softcap, double dropout_p, OptionalTensor delta) {
  constexpr const char* kOp = "flash_attn_varlen_bwd";
  Call call;
  FlashAttnArgs& args = call.args;
  const Used used = set_sequences(kOp, q, k, v, cu_seqlens_q, cu_seqlens_k, call);
  set_options(kOp, {softmax_scale, window_left, window_right, top_left, softcap, dropout_p}, args);
  set_row_terms(kOp, alibi_slopes, sink, rng, dropout_p, call);
  set_results(kOp, dout, dlse, delta, q, v, out, lse, call);
  for (AttnSequence& seq : call.sequences) seq.dout = seq.first_row * dout.stride(0);
  std::vector<double> dsink_of_head(sink ? args.num_sequences * args.heads : 0);
  args.dsink_of_head = dsink_of_head.data();
  const bool visits_all = args.heads > 0;
  Tensor dq = make_result(q, {q.size(0), q.size(1), q.size(2)}, used.rows < q.size(0));
  const bool has_slack = used.keys < k.size(0) || !visits_all;
  Tensor dk = make_result(k, {k.size(0), k.size(1), k.size(2)}, has_slack);
  Tensor dv = make_result(v, {v.size(0), v.size(1), v.size(2)}, has_slack);
  args.dq = dq.mutable_data_ptr();
  args.dk = dk.mutable_data_ptr();
  args.dv = dv.mutable_data_ptr();
  if (visits_all) run_flash_attn_bwd(args, pick_body(args.type), torch_threads());
  return {dq, dk, dv, sum_dsink(dsink_of_head, q, sink)};
}

}  // namespace
}  // namespace mcp::attn

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("flash_attn_varlen", TORCH_BOX(&mcp::attn::flash_attn_varlen));
  m.impl("flash_attn_varlen_bwd", TORCH_BOX(&mcp::attn::flash_attn_varlen_bwd));
}
