// flash_attn and flash_attn_bwd on CPU: batches of equal lengths, [B, S, H, D].
#include "cpu/flash_attn_call.h"

namespace mcp::attn {
namespace {

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
Tensor make_dbias(const Tensor& q, const Tensor& k, const Tensor& bias, FlashAttnArgs& args) {
  const int64_t sizes[4] = {bias.size(0), bias.size(1), bias.size(2), bias.size(3)};
  const int64_t full[4] = {q.size(0), q.size(2), q.size(1), k.size(1)};
  Tensor dbias = torch::stable::new_zeros(q, {sizes[0], sizes[1], sizes[2], sizes[3]}, sum_type(q));
  int64_t strides[4];
  for (int dim = 0; dim < 4; ++dim) {
    strides[dim] = sizes[dim] == 1 && full[dim] > 1 ? 0 : dbias.stride(dim);
  }
  args.dbias = dbias.mutable_data_ptr();
  args.dbias_strides = {args.dbias, args.type, strides[0], strides[1], strides[2], strides[3]};
  return dbias;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_attn_bwd(
    Tensor dout, OptionalTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
    OptionalTensor bias, OptionalTensor alibi_slopes, OptionalTensor sink, OptionalTensor rng,
    bool needs_dbias, double softmax_scale, int64_t window_left, int64_t window_right,
    bool top_left, double softcap, double dropout_p, OptionalTensor delta) {
  constexpr const char* kOp = "flash_attn_bwd";
  Call call;
  FlashAttnArgs& args = call.args;
  STD_TORCH_CHECK(!needs_dbias || bias, kOp, ": bias must be given where its gradient is wanted");
  set_batch(kOp, q, k, v, bias, call);
  set_options(kOp, {softmax_scale, window_left, window_right, top_left, softcap, dropout_p}, args);
  set_row_terms(kOp, alibi_slopes, sink, rng, dropout_p, call);
  set_results(kOp, dout, dlse, delta, q, v, out, lse, call);
  for (AttnSequence& seq : call.sequences) seq.dout = seq.batch * dout.stride(0);
  Tensor dbias = torch::stable::new_empty(q, {0});
  if (needs_dbias) dbias = make_dbias(q, k, *bias, args);
  std::vector<double> dsink_of_head(sink ? args.num_sequences * args.heads : 0);
  args.dsink_of_head = dsink_of_head.data();
  const auto make = [&](const Tensor& x) {
    // Without a query head nothing is visited.
    return make_result(x, {x.size(0), x.size(1), x.size(2), x.size(3)}, args.heads == 0);
  };
  Tensor dq = make(q), dk = make(k), dv = make(v);
  args.dq = dq.mutable_data_ptr();
  args.dk = dk.mutable_data_ptr();
  args.dv = dv.mutable_data_ptr();
  if (args.heads > 0) run_flash_attn_bwd(args, pick_body(args.type), torch_threads());
  if (needs_dbias) {
    dbias = bias->scalar_type() == dbias.scalar_type()
                ? dbias
                : torch::stable::to(dbias, bias->scalar_type());
  }
  return {dq, dk, dv, dbias, sum_dsink(dsink_of_head, q, sink)};
}

}  // namespace
}  // namespace mcp::attn

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("flash_attn", TORCH_BOX(&mcp::attn::flash_attn));
  m.impl("flash_attn_bwd", TORCH_BOX(&mcp::attn::flash_attn_bwd));
}
