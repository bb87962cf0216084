#include "cpu/flash_attn_stream.h"

namespace mcp {
namespace {

// Neighbouring heads that one task reads together where they lie closer than neighbouring keys:
// enough that what it reads of a key is a few kilobytes in one piece.
constexpr int64_t kStreamHeads = 8;

// Keys of a split for some neighbouring heads of one sequence.
struct Piece {
  int64_t head, num_heads, first_key, last_key, num_splits;
  bool is_first;  // of its splits
  int64_t slot;   // in scalars: where its partial result lies
};

struct KeySpan {
  int64_t first, last;
};

// The keys that any row of a sequence sees, as its window has it.
KeySpan visible_span(const FlashAttnArgs& args, const AttnSequence& seq) {
  const int64_t offset = args.top_left ? 0 : seq.num_keys - seq.num_rows;
  KeySpan span{0, seq.num_keys};
  if (args.window_left >= 0) span.first = std::max<int64_t>(0, offset - args.window_left);
  if (args.window_right >= 0) {
    span.last = std::min(span.last, seq.num_rows + offset + args.window_right);
  }
  return span;
}

int64_t rows_of(const FlashAttnArgs& args, const AttnHead& head) {
  return head.sequence->num_rows * group_of(args);
}

// Scalars from one row of a partial result to the next.
int64_t partial_row(const FlashAttnArgs& args) { return attn_ld(args.value_dim) + kAttnPad; }

// The pieces, and the scalars that partial results take.
std::vector<Piece> cut_keys(const FlashAttnArgs& args, const std::vector<AttnHead>& heads,
                            int64_t& num_scalars) {
  const int64_t num_heads = static_cast<int64_t>(heads.size());
  const bool together = args.k.head < args.k.row && attn_is_in_place(args);
  std::vector<Piece> pieces;
  num_scalars = 0;
  for (int64_t head = 0, count = 1; head < num_heads; head += count) {
    const AttnSequence& seq = *heads[head].sequence;
    const int64_t rows = rows_of(args, heads[head]);
    const int64_t most = together ? std::min(kStreamHeads, kAttnRows / rows) : 1;
    for (count = 1; count < most && head + count < num_heads; ++count) {
      if (heads[head + count].sequence != &seq) break;
    }
    const KeySpan span = visible_span(args, seq);
    const int64_t begin = span.first / kAttnSplit * kAttnSplit;
    const int64_t splits = std::max<int64_t>(1, (span.last - begin + kAttnSplit - 1) / kAttnSplit);
    for (int64_t i = 0; i < splits; ++i) {
      const int64_t first = begin + i * kAttnSplit;
      pieces.push_back({head, count, first, std::min(first + kAttnSplit, seq.num_keys), splits,
                        i == 0, num_scalars});
      if (splits > 1) num_scalars += count * rows * partial_row(args);
    }
  }
  return pieces;
}

}  // namespace

void stream_heads(const Work& work, std::vector<AttnHead>& heads) {
  const FlashAttnArgs& args = work.args;
  int64_t num_scalars, most_rows = 0;
  const std::vector<Piece> pieces = cut_keys(args, heads, num_scalars);
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  for (const Piece& piece : pieces) {
    most_rows = std::max(most_rows, piece.num_heads * rows_of(args, heads[piece.head]));
  }
  const int64_t scratch_bytes = array_bytes(args, attn_stream_scratch(args, most_rows));
  const int64_t num_workers = std::min(work.num_threads, num_pieces);
  const KeptMemory memory(num_workers * scratch_bytes + num_scalars * scalar_bytes(args));
  const auto scratch_of = [&](int64_t worker) { return memory.at(worker * scratch_bytes); };
  const auto partial_at = [&](int64_t slot) {
    return memory.at(num_workers * scratch_bytes + slot * scalar_bytes(args));
  };
  work.share(num_pieces, [&](int64_t i, int64_t worker) {
    const Piece& piece = pieces[i];
    const AttnHead& head = heads[piece.head];
    void* partial = piece.num_splits == 1 ? nullptr : partial_at(piece.slot);
    work.body.stream(
        args,
        {head.sequence, head.kv_head, piece.num_heads, piece.first_key, piece.last_key, partial},
        scratch_of(worker));
  });
  if (num_scalars == 0) return;
  work.share(num_pieces, [&](int64_t i, int64_t worker) {
    const Piece& piece = pieces[i];
    if (piece.num_splits == 1 || !piece.is_first) return;
    const int64_t rows = rows_of(args, heads[piece.head]), head_scalars = rows * partial_row(args);
    for (int64_t h = 0; h < piece.num_heads; ++h) {
      AttnForwardTask task{};
      task.head = &heads[piece.head + h];
      task.last_row = rows;
      task.partial = partial_at(piece.slot + h * head_scalars);
      work.body.join(args, task, piece.num_splits, piece.num_heads * head_scalars,
                     scratch_of(worker));
    }
  });
}

}  // namespace mcp
