// Flash attention on CPU: the contract of the compiled bodies. No torch here.
//
//   S = scale * q k^T, then softcap, bias, ALiBi, window
//   lse = log(sum_j exp S_j + exp sink)         P = exp(S - lse)
//   out = (P * keep / (1 - p)) v
//   dP = dout v^T * keep / (1 - p)              delta = rowsum(P dP) - dlse, or with
//   dS = P * (dP - delta)                       rowsum(dout out) where out is not 16-bit, or it
//                                               is given where the keys are a part of all
//   dq = scale * dS k     dk = scale * dS^T q   dv = (P * keep / (1 - p))^T dout
//
// Source: Dao, "FlashAttention-2", 2023; blocks of scores stay in cache, keys are packed once for
// all query heads of their group. mcp_kernels/ops/attention_reference.py is the definition.
// Cost: 2 (D + E) flops a visible score forward, 2.5 times that backward (3.5 times for 16-bit,
// whose delta takes two products more); memory O(S (D + E)).
//
// Sums run in float32, in float64 for float64; each result is rounded once. The order of every sum
// follows from the shapes alone, so results do not depend on the number of threads.
//
// Letters: H = query heads, N = KV heads, G = H / N, D = head dim of q and k, E = of v. A row m of
// a KV head is query position m / G of its query head m % G: the G heads share each tile of keys.
#pragma once

#include <atomic>
#include <cstdint>

namespace mcp {

enum class AttnType { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

// Rows of a tile of scores: 8 micro-tiles of 6; with kAttnKeys columns it takes 24 KiB of L1.
constexpr int kAttnRows = 48;
constexpr int kAttnKeys = 128;
// Blocks of rows that meet one tile of keys before the next is read, at least where there are as
// many: packed keys of long sequences come from a shared cache, and come a quarter as often.
constexpr int kAttnBlocks = 4;
// And at most: packing a tile for so many costs ~1 % of what they do with it.
constexpr int kAttnMostBlocks = 16;
// Keys that lie side by side in a packed panel: the 4 registers of a micro-tile on AVX-512.
constexpr int kAttnPanel = 64;
// Widths are padded with zeros to this, a whole number of registers on every instruction set.
constexpr int kAttnPad = 16;
// Rows of a KV head up to which its keys are read where they lie: packing them would cost more.
constexpr int kAttnStreamRows = 16;
// Keys that one task of such a call goes through; what a row adds up depends on nothing else.
constexpr int kAttnSplit = 1024;

// Rows or keys that one unit of a product over them may hold; arrays hold a whole number.
constexpr int kAttnUnit = 2;

constexpr int64_t attn_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scalars from one packed row to the next: its width in whole cache lines. Above a panel an odd
// number of them, else 64 columns of many rows would fall on half of the sets of L1.
constexpr int64_t attn_ld(int64_t width) {
  const int64_t padded = attn_round_up(width, kAttnPad);
  return padded > kAttnPanel && padded / kAttnPad % 2 == 0 ? padded + kAttnPad : padded;
}

struct AttnTensor {
  const void* data;
  int64_t row, head, dim;  // strides in elements
};

// One batch entry, or one sequence of a packed batch.
struct AttnSequence {
  int64_t num_rows, num_keys;
  int64_t first_row, first_key;  // rows before it in the contiguous results [rows, H, ...]
  int64_t q, k, v, dout;         // elements before it in the tensors
  int64_t lse;                   // elements before row 0 of head 0 in lse
  int64_t batch;                 // its index: for dropout, bias and slopes
  // Where k and v are pages: page i holds positions i * page_size and on, and key 0 is position
  // page_key of them. Null: the keys lie row after row.
  const int64_t* pages = nullptr;
  int64_t page_key = 0;
};

struct AttnBias {
  const void* data;  // null: none
  AttnType type;
  int64_t batch, head, row, key;  // strides in elements, 0 where broadcast
};

struct FlashAttnArgs {
  AttnType type;  // of q, k, v, out, dout and their gradients
  AttnTensor q, k, v, dout;
  const AttnSequence* sequences;
  int64_t num_sequences, heads, kv_heads, head_dim, value_dim;
  int64_t page_size, k_page, v_page;  // of sequences in pages; from page to page in elements

  double scale, softcap;              // softcap 0: off
  int64_t window_left, window_right;  // below 0: no limit
  bool top_left;
  AttnBias bias;
  const double* slopes;  // ALiBi, null: none
  int64_t slopes_batch;  // stride of slopes by batch; by head it is 1
  const double* sink;    // [H], null: none
  double dropout_p;      // 0: no dropout
  uint64_t seed, offset;

  void* out;               // [rows, H, E]; read in backward
  void* lse;               // float32 (float64 for float64); read in backward
  int64_t lse_head;        // stride by head
  const void* dlse;        // laid out as lse, null: none
  const void* delta;       // the same; read in place of dlse and out where k and v are a part of
                           // the keys that lse is of. Null: it is made of them
  void *dq, *dk, *dv;      // [rows, H, D], [keys, N, D], [keys, N, E]
  void* dbias;             // float32 (float64), contiguous; null: not wanted
  AttnBias dbias_strides;  // strides of dbias
  double* dsink_of_head;   // [num_sequences, H]
};

// What is packed of one KV head of one sequence. Scalars are float, or double for float64; a body
// may hold two factors in a scalar's place, and half as many of them.
struct AttnHead {
  const AttnSequence* sequence;
  int64_t kv_head;
  void* k_panels;  // [panels][D][kAttnPanel]
  void* v_rows;    // [keys][attn_ld(E)]
  // Backward.
  void* v_panels;               // [panels][E][kAttnPanel]
  void* k_rows;                 // [keys][attn_ld(D)]
  void* q_rows;                 // [G * rows][attn_ld(D)]
  void* do_rows;                // [G * rows][attn_ld(E)]
  void* lse;                    // [G * rows], +inf where a row saw no key
  void* delta;                  // [G * rows]
  void* dq_parts;               // [chunks][G * rows][attn_ld(D)]
  std::atomic<bool> is_finite;  // q, k, v and dout as far as they are packed
};

// Keys [first_key, last_key) for rows [first_row, last_row), at most the blocks that the scratch is
// for, or one a head where `partial` is wanted. first_key is a multiple of kAttnKeys.
struct AttnForwardTask {
  AttnHead* head;  // packed, or only its sequence and kv_head where is_packed is false
  bool is_packed;
  int64_t first_row, last_row;
  int64_t first_key, last_key;
  void* partial;  // [rows][attn_ld(E) + kAttnPad] of a split; null: the task finishes its rows
  // Where not packed, heads [head, head + num_heads) of one sequence are gone through together, a
  // tile of each in turn: they lie side by side in memory. Their partials are partial_head apart.
  int64_t num_heads, partial_head;
};

// All rows of KV heads [kv_head, kv_head + num_heads) of a sequence, together at most kAttnRows and
// at most kAttnStreamRows a head, with keys [first_key, last_key), read where they lie. No bias.
struct AttnStreamTask {
  const AttnSequence* sequence;
  int64_t kv_head, num_heads;  // 1 head where its rows are no whole registers: see attn_is_in_place
  int64_t first_key, last_key;
  void* partial;  // [num_heads * rows][attn_ld(E) + kAttnPad]; null: the task finishes its rows
};

// The functions of one instruction set for one type.
struct FlashAttnBody {
  // Keys [first, last) into k_panels and v_rows; backward also into v_panels and k_rows.
  // first is a multiple of kAttnPanel.
  void (*pack_keys)(const FlashAttnArgs&, AttnHead&, int64_t first, int64_t last, bool backward);
  void (*forward)(const FlashAttnArgs&, const AttnForwardTask&, void* scratch);
  void (*stream)(const FlashAttnArgs&, const AttnStreamTask&, void* scratch);
  // Joins the partial results of all splits of some rows, `stride` scalars apart.
  void (*join)(const FlashAttnArgs&, const AttnForwardTask&, int64_t num_splits, int64_t stride,
               void* scratch);
  // Rows [first, last) into q_rows, do_rows, lse and delta.
  void (*pack_rows)(const FlashAttnArgs&, AttnHead&, int64_t first, int64_t last);
  // What pack_rows leaves out of delta, of rows [first, last), at most kAttnRows; null: nothing.
  void (*add_deltas)(const FlashAttnArgs&, AttnHead&, int64_t first, int64_t last, void* scratch);
  // dk and dv of keys [first, last), and their part of dq.
  void (*backward)(const FlashAttnArgs&, AttnHead&, int64_t first, int64_t last, void* dq_part,
                   void* scratch);
  // dq of rows [first, last) from the parts; adds the rows' part of dsink.
  void (*finish_dq)(const FlashAttnArgs&, AttnHead&, int64_t first, int64_t last,
                    int64_t num_parts);
};

// Whether rows of k and v can be read by whole registers; else a task copies them first.
inline bool attn_is_in_place(const FlashAttnArgs& args) {
  return args.k.dim == 1 && args.v.dim == 1 && args.head_dim % kAttnPad == 0 &&
         args.value_dim % kAttnPad == 0;
}

// Scalars of scratch that one worker needs for tasks of up to so many blocks.
constexpr int64_t attn_forward_scratch(int64_t head_dim, int64_t value_dim, int64_t blocks) {
  const int64_t d = attn_ld(head_dim), e = attn_ld(value_dim);
  return kAttnRows * kAttnKeys + (kAttnKeys + blocks * kAttnRows) * (d + e);
}
// Of a streamed task of `rows` rows in all, and of joining its splits.
inline int64_t attn_stream_scratch(const FlashAttnArgs& args, int64_t rows) {
  const int64_t d = attn_ld(args.head_dim), e = attn_ld(args.value_dim);
  const int64_t copied = attn_is_in_place(args) ? d : kAttnKeys * (d + e);
  return kAttnRows * (kAttnKeys + e) + rows * d + copied;
}
constexpr int64_t attn_backward_scratch(int64_t head_dim, int64_t value_dim) {
  const int64_t d = attn_ld(head_dim), e = attn_ld(value_dim);
  return 2 * kAttnRows * kAttnKeys + kAttnKeys * (d + e);
}

namespace scalar {
const FlashAttnBody& flash_attn_body(AttnType type);
}
namespace avx2 {
const FlashAttnBody& flash_attn_body(AttnType type);
}
namespace avx512 {
const FlashAttnBody& flash_attn_body(AttnType type);
}
namespace avx512_bf16 {
const FlashAttnBody& flash_attn_body();  // of bfloat16, the one type that it is for
}

}  // namespace mcp
