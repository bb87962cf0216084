#include "cpu/flash_attn_run.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/flash_attn_append.h"
#include "cpu/flash_attn_pages.h"
#include "cpu/flash_attn_stream.h"
#include "cpu/flash_attn_work.h"

namespace mcp {
namespace {

// Keys or rows that one packing task takes: a whole number of panels, ~50 us of copying.
constexpr int64_t kPackPart = 512;
// Packed heads that are held at a time: what a shared cache has for two cores.
constexpr int64_t kPackedBytes = 32 << 20;
// Forward tasks that each thread should have where several work: causal ones differ in length.
constexpr int64_t kTasksOfThread = 4;
// What the blocks of a forward task may take of a core's own cache, ~half of it.
constexpr int64_t kBlocksBytes = 1 << 20;
// Distance of rows of k and v up to which each task packs the tiles that it meets: they come from
// its core's cache then, not from the shared one. Rows further apart, each in a page of its own and
// all in a few sets of a cache, are slow to pack: once for all tasks is better.
constexpr int64_t kNearRowBytes = 2048;
// Backward tasks that a call is cut into where it has fewer heads than that, and the fewest keys
// that are worth a part of dq of their own. Shapes alone decide, never the number of threads.
constexpr int64_t kBackwardTasks = 8;
constexpr int64_t kMaxParts = 8;
constexpr int64_t kKeysOfPart = 512;

int64_t parts_of(const FlashAttnArgs& args, const AttnSequence& seq) {
  const int64_t heads = args.num_sequences * args.kv_heads;
  const int64_t wanted = std::min(kMaxParts, (kBackwardTasks + heads - 1) / heads);
  return std::max<int64_t>(1, std::min(wanted, seq.num_keys / kKeysOfPart));
}

// Parts of dq that are held at a time. One thread meets them in order: it adds each to the first as
// soon as it is done, as finish_dq would, and uses one buffer for all of them.
int64_t dq_buffers_of(const Work& work, const AttnSequence& seq) {
  const int64_t parts = parts_of(work.args, seq);
  return work.num_threads == 1 ? std::min<int64_t>(parts, 2) : parts;
}

// Puts the arrays of a head one after another from `memory` on; null only measures. Bytes taken.
int64_t place_arrays(const Work& work, AttnHead& head, char* memory, bool backward) {
  const FlashAttnArgs& args = work.args;
  const AttnSequence& seq = *head.sequence;
  const int64_t d = attn_ld(args.head_dim);
  const int64_t e = attn_ld(args.value_dim);
  const int64_t keys = attn_round_up(seq.num_keys, kAttnPanel);
  const int64_t rows = attn_round_up(seq.num_rows * group_of(args), kAttnUnit);
  int64_t taken = 0;
  const auto take = [&](void*& array, int64_t scalars) {
    taken += place_array(args, memory == nullptr ? nullptr : memory + taken, scalars, array);
  };
  take(head.k_panels, keys * args.head_dim);
  if (!backward) {
    take(head.v_rows, keys * e);
    return taken;
  }
  take(head.v_panels, keys * args.value_dim);
  take(head.k_rows, keys * d);
  take(head.q_rows, rows * d);
  take(head.do_rows, rows * e);
  take(head.lse, rows);
  take(head.delta, rows);
  take(head.dq_parts, dq_buffers_of(work, seq) * rows * d);
  return taken;
}

// The KV heads of all sequences, those with most work first.
std::vector<AttnHead> list_heads(const FlashAttnArgs& args) {
  std::vector<int64_t> order(args.num_sequences);
  for (int64_t b = 0; b < args.num_sequences; ++b) order[b] = b;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const AttnSequence &first = args.sequences[a], &second = args.sequences[b];
    return first.num_rows * first.num_keys > second.num_rows * second.num_keys;
  });
  std::vector<AttnHead> heads(args.num_sequences * args.kv_heads);
  for (size_t i = 0; i < heads.size(); ++i) {
    heads[i].sequence = &args.sequences[order[i / args.kv_heads]];
    heads[i].kv_head = static_cast<int64_t>(i) % args.kv_heads;
    heads[i].is_finite.store(true, std::memory_order_relaxed);
  }
  return heads;
}

// Runs `wave` on as many heads at a time as their arrays may take of memory; at least one, and one
// alone where one thread works, so that what it packed is still in its cache.
template <class Wave>
void in_waves(const Work& work, std::vector<AttnHead>& heads, bool backward, const Wave& wave) {
  std::vector<int64_t> bytes(heads.size());
  for (size_t i = 0; i < heads.size(); ++i) {
    bytes[i] = place_arrays(work, heads[i], nullptr, backward);
  }
  const int64_t budget = work.num_threads == 1 ? 0 : kPackedBytes;
  std::unique_ptr<Memory> memory;
  int64_t held = -1;
  for (size_t first = 0, last = 0; first < heads.size(); first = last) {
    int64_t taken = 0;
    do {
      taken += bytes[last++];
    } while (last < heads.size() && taken + bytes[last] <= budget);
    if (taken > held) {
      memory.reset();
      memory = std::make_unique<Memory>(taken);
      held = taken;
    }
    taken = 0;
    for (size_t i = first; i < last; ++i) {
      taken += place_arrays(work, heads[i], memory->at(taken), backward);
    }
    wave(&heads[first], static_cast<int64_t>(last - first));
  }
}

template <class T>
void add_scalars(char* sums, const char* part, int64_t count) {
  T* to = reinterpret_cast<T*>(sums);
  const T* from = reinterpret_cast<const T*>(part);
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

void add_part(const FlashAttnArgs& args, char* sums, const char* part, int64_t count) {
  if (args.type == AttnType::kFloat64) return add_scalars<double>(sums, part, count);
  add_scalars<float>(sums, part, count);
}

struct Part {
  AttnHead* head;
  int64_t index, first, last;  // the how many-eth of its head
};

// [0, size) of each head in parts of `step`; none of a head without any.
template <class Size>
std::vector<Part> cut(AttnHead* heads, int64_t count, int64_t step, const Size& size) {
  std::vector<Part> parts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t total = size(heads[i]);
    for (int64_t first = 0; first < total; first += step) {
      parts.push_back({&heads[i], first / step, first, std::min(first + step, total)});
    }
  }
  return parts;
}

int64_t num_keys(const AttnHead& head) { return head.sequence->num_keys; }

// Whether tasks pack the keys of a head themselves. Shapes and strides alone decide.
bool packs_in_tasks(const FlashAttnArgs& args, const AttnSequence& seq) {
  return seq.pages == nullptr && args.k.dim == 1 && args.v.dim == 1 &&
         std::max(args.k.row, args.v.row) * attn_element_bytes(args.type) <= kNearRowBytes;
}

// Blocks of rows that a task takes: many, so that a tile of keys is packed or read for all of them,
// but not so many that threads have nothing to share. No result depends on it.
int64_t blocks_of_task(const Work& work, const std::vector<AttnHead>& heads) {
  const FlashAttnArgs& args = work.args;
  const int64_t block = kAttnRows * (attn_ld(args.head_dim) + attn_ld(args.value_dim));
  int64_t total = 0, longest = 0;
  for (const AttnHead& head : heads) {
    const int64_t rows = head.sequence->num_rows * group_of(args);
    longest = std::max(longest, (rows + kAttnRows - 1) / kAttnRows);
    total += (rows + kAttnRows - 1) / kAttnRows;
  }
  // Heads may have no width at all.
  const int64_t fit = kBlocksBytes / std::max<int64_t>(1, block * scalar_bytes(args));
  const int64_t most = std::clamp<int64_t>(std::min(fit, longest), kAttnBlocks, kAttnMostBlocks);
  const int64_t tasks = work.num_threads == 1 ? 1 : work.num_threads * kTasksOfThread;
  return std::clamp<int64_t>(total / tasks, kAttnBlocks, most);
}

// All rows of some heads, in tasks of up to `blocks` blocks.
void forward_rows(const Work& work, const Memory& scratch, int64_t scratch_bytes, int64_t blocks,
                  AttnHead* heads, int64_t count, bool is_packed) {
  const std::vector<Part> rows = cut(heads, count, blocks * kAttnRows, [&](const AttnHead& head) {
    return head.sequence->num_rows * group_of(work.args);
  });
  const int64_t num_tasks = static_cast<int64_t>(rows.size());
  work.share(num_tasks, [&](int64_t i, int64_t worker) {
    // Last rows first: where causal they see most keys, and short tasks at the end let threads
    // finish together.
    const Part& part = rows[num_tasks - 1 - i];
    work.body.forward(
        work.args,
        {part.head, is_packed, part.first, part.last, 0, num_keys(*part.head), nullptr, 1, 0},
        scratch.at(worker * scratch_bytes));
  });
}

// Heads whose keys are packed once, for all tasks.
void forward_packed(const Work& work, const Memory& scratch, int64_t scratch_bytes,
                    std::vector<AttnHead>& packed) {
  in_waves(work, packed, false, [&](AttnHead* heads, int64_t count) {
    const std::vector<Part> keys = cut(heads, count, kPackPart, num_keys);
    work.share(static_cast<int64_t>(keys.size()), [&](int64_t i, int64_t) {
      pack_keys_of(work.args, work.body, *keys[i].head, keys[i].first, keys[i].last);
    });
    forward_rows(work, scratch, scratch_bytes, kAttnBlocks, heads, count, true);
  });
}

// Keys of a split for some neighbouring heads of one sequence.
struct Piece {
  int64_t head, num_heads, first_key, num_splits;
  int64_t slot;  // of the first head's partial result; the next head's is num_splits further on
};

// Neighbouring heads go together where they lie closer than neighbouring keys.
std::vector<Piece> cut_keys(const FlashAttnArgs& args, const std::vector<AttnHead>& heads) {
  const int64_t num_heads = static_cast<int64_t>(heads.size());
  const int64_t most = args.k.head < args.k.row ? kAttnBlocks : 1;
  std::vector<Piece> pieces;
  for (int64_t head = 0, slot = 0, count = 1; head < num_heads; head += count) {
    const AttnSequence* seq = heads[head].sequence;
    for (count = 1; count < most && head + count < num_heads; ++count) {
      if (heads[head + count].sequence != seq) break;
    }
    const int64_t splits = std::max<int64_t>(1, (seq->num_keys + kAttnSplit - 1) / kAttnSplit);
    for (int64_t i = 0; i < splits; ++i) {
      pieces.push_back({head, count, i * kAttnSplit, splits, slot + i});
    }
    slot += splits * count;
  }
  return pieces;
}

// Heads whose rows are one block: tasks read keys in place or pack them, and long keys are split.
void forward_split(const Work& work, const Memory& scratch, int64_t scratch_bytes,
                   std::vector<AttnHead>& heads) {
  const FlashAttnArgs& args = work.args;
  const std::vector<Piece> pieces = cut_keys(args, heads);
  const int64_t stride = kAttnRows * (attn_ld(args.value_dim) + kAttnPad);
  int64_t num_slots = 0;  // none where no head is split
  for (const Piece& piece : pieces) {
    if (piece.num_splits == 1) continue;
    const int64_t last_head = piece.slot + (piece.num_heads - 1) * piece.num_splits;
    num_slots = std::max(num_slots, last_head + 1);
  }
  const Memory partials(num_slots * stride * scalar_bytes(args));
  const auto task_of = [&](const Piece& piece, int64_t h) {
    AttnHead* head = &heads[piece.head + h];
    const int64_t slot = piece.slot + h * piece.num_splits;
    return AttnForwardTask{
        head,
        false,
        0,
        head->sequence->num_rows * group_of(args),
        piece.first_key,
        std::min(piece.first_key + kAttnSplit, num_keys(*head)),
        piece.num_splits == 1 ? nullptr : partials.at(slot * stride * scalar_bytes(args)),
        piece.num_heads,
        piece.num_splits * stride};
  };
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  work.share(num_pieces, [&](int64_t i, int64_t worker) {
    work.body.forward(args, task_of(pieces[i], 0), scratch.at(worker * scratch_bytes));
  });
  if (num_slots == 0) return;
  work.share(num_pieces, [&](int64_t i, int64_t worker) {
    const Piece& piece = pieces[i];
    if (piece.num_splits == 1 || piece.first_key != 0) return;
    for (int64_t h = 0; h < piece.num_heads; ++h) {
      work.body.join(args, task_of(piece, h), piece.num_splits, stride,
                     scratch.at(worker * scratch_bytes));
    }
  });
}

// The heads with rows that `is_chosen` takes.
template <class Chosen>
std::vector<AttnHead> choose(const std::vector<AttnHead>& heads, const Chosen& is_chosen) {
  const auto takes = [&](const AttnHead& head) {
    return head.sequence->num_rows > 0 && is_chosen(head);
  };
  std::vector<AttnHead> chosen(std::count_if(heads.begin(), heads.end(), takes));
  size_t next = 0;
  for (const AttnHead& head : heads) {
    if (!takes(head)) continue;
    chosen[next].sequence = head.sequence;
    chosen[next].kv_head = head.kv_head;
    chosen[next++].is_finite.store(true, std::memory_order_relaxed);
  }
  return chosen;
}

}  // namespace

void run_flash_attn(const FlashAttnArgs& args, const FlashAttnBody& body,
                    const FlashAttnThreads& threads) {
  const Work work = plan_work(args, body, threads);
  std::vector<AttnHead> all = list_heads(args);
  const auto rows_of = [&](const AttnHead& head) {
    return head.sequence->num_rows * group_of(args);
  };
  const auto is_streamed = [&](const AttnHead& head) {
    return rows_of(head) <= kAttnStreamRows && args.bias.data == nullptr;
  };
  const auto is_split = [&](const AttnHead& head) {
    return !is_streamed(head) && rows_of(head) <= kAttnRows && head.sequence->pages == nullptr;
  };
  const auto is_tall = [&](const AttnHead& head) { return !is_streamed(head) && !is_split(head); };
  const auto is_near = [&](const AttnHead& head) {
    return is_tall(head) && packs_in_tasks(args, *head.sequence);
  };
  const auto is_far = [&](const AttnHead& head) {
    return is_tall(head) && !packs_in_tasks(args, *head.sequence);
  };
  std::vector<AttnHead> streamed = choose(all, is_streamed), split = choose(all, is_split),
                        near = choose(all, is_near), far = choose(all, is_far);
  if (!streamed.empty()) stream_heads(work, streamed);
  if (near.empty() && far.empty() && split.empty()) return;
  const int64_t blocks = blocks_of_task(work, near);
  const int64_t scratch_bytes =
      array_bytes(args, attn_forward_scratch(args.head_dim, args.value_dim, blocks));
  const Memory scratch(work.num_threads * scratch_bytes);
  if (!near.empty()) {
    const int64_t count = static_cast<int64_t>(near.size());
    forward_rows(work, scratch, scratch_bytes, blocks, near.data(), count, false);
  }
  if (!far.empty()) forward_packed(work, scratch, scratch_bytes, far);
  if (!split.empty()) forward_split(work, scratch, scratch_bytes, split);
}

void run_flash_attn_bwd(const FlashAttnArgs& args, const FlashAttnBody& body,
                        const FlashAttnThreads& threads) {
  const Work work = plan_work(args, body, threads);
  const int64_t group = group_of(args), d = attn_ld(args.head_dim);
  const auto num_rows = [&](const AttnHead& head) { return head.sequence->num_rows * group; };
  std::vector<AttnHead> all = list_heads(args);
  const int64_t scratch_bytes =
      array_bytes(args, attn_backward_scratch(args.head_dim, args.value_dim));
  const Memory scratch(work.num_threads * scratch_bytes);
  // Where several tasks add to one place of dbias they do so one after another, always in order.
  const AttnBias& to = args.dbias_strides;
  const bool is_shared =
      args.dbias != nullptr && (to.batch == 0 || to.head == 0 || to.row == 0 || to.key == 0);
  const FlashAttnThreads one{1, threads.parallel_for};
  const Work in_order{args, body, one, 1};

  in_waves(work, all, true, [&](AttnHead* heads, int64_t count) {
    const std::vector<Part> keys = cut(heads, count, kPackPart, num_keys);
    const std::vector<Part> rows = cut(heads, count, kPackPart, num_rows);
    const int64_t num_key_tasks = static_cast<int64_t>(keys.size());
    work.share(num_key_tasks + static_cast<int64_t>(rows.size()), [&](int64_t i, int64_t) {
      const Part& part = i < num_key_tasks ? keys[i] : rows[i - num_key_tasks];
      if (i < num_key_tasks) return body.pack_keys(args, *part.head, part.first, part.last, true);
      body.pack_rows(args, *part.head, part.first, part.last);
    });
    if (body.add_deltas != nullptr && args.delta == nullptr) {
      const std::vector<Part> blocks = cut(heads, count, kAttnRows, num_rows);
      const int64_t num_blocks = static_cast<int64_t>(blocks.size());
      work.share(num_blocks, [&](int64_t i, int64_t worker) {
        const Part& part = blocks[num_blocks - 1 - i];
        body.add_deltas(args, *part.head, part.first, part.last,
                        scratch.at(worker * scratch_bytes));
      });
    }
    std::vector<Part> tasks;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t parts = parts_of(args, *heads[i].sequence), total = num_keys(heads[i]);
      const int64_t step = attn_round_up((total + parts - 1) / parts, kAttnKeys);
      for (int64_t part = 0; part < parts; ++part) {
        tasks.push_back(
            {&heads[i], part, std::min(part * step, total), std::min((part + 1) * step, total)});
      }
    }
    (is_shared ? in_order : work)
        .share(static_cast<int64_t>(tasks.size()), [&](int64_t i, int64_t worker) {
          const Part& task = tasks[i];
          const int64_t scalars = num_rows(*task.head) * d;
          const int64_t buffers = dq_buffers_of(work, *task.head->sequence);
          char* sums = static_cast<char*>(task.head->dq_parts);
          char* dq = sums + std::min(task.index, buffers - 1) * scalars * scalar_bytes(args);
          body.backward(args, *task.head, task.first, task.last, dq,
                        scratch.at(worker * scratch_bytes));
          if (buffers < parts_of(args, *task.head->sequence) && task.index > 0) {
            add_part(args, sums, dq, scalars);
          }
        });
    // dsink is a sum over the rows of a head: one task adds them all, in order.
    const std::vector<Part> results =
        cut(heads, count, args.sink != nullptr ? INT64_MAX / 2 : kPackPart, num_rows);
    work.share(static_cast<int64_t>(results.size()), [&](int64_t i, int64_t) {
      const Part& part = results[i];
      const AttnSequence& seq = *part.head->sequence;
      const int64_t buffers = dq_buffers_of(work, seq);
      const int64_t left = buffers < parts_of(args, seq) ? 1 : buffers;
      body.finish_dq(args, *part.head, part.first, part.last, left);
    });
  });
}

}  // namespace mcp
