// flash_attn_kvcache on CPU: new keys are rotated and written into the cache, then each entry's
// keys are read where they lie, in a row of the cache or in pages that a block table names.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/flash_attn_append.h"
#include "cpu/flash_attn_call.h"

namespace mcp::attn {
namespace {

constexpr const char* kOp = "flash_attn_with_kvcache";

// A value that breaks the contract: ValueError in Python, as from the reference.
template <class... Words>
void check_value(bool is_right, const Words&... words) {
  if (is_right) return;
  std::ostringstream text;
  ((text << kOp << ": ") << ... << words);
  throw std::invalid_argument(text.str());
}

// Small integers of a call as int64, whatever they were; empty where not given.
std::vector<int64_t> integers(const char* name, const OptionalTensor& x, int64_t count) {
  if (!x) return {};
  STD_TORCH_CHECK(x->is_cpu(), kOp, ": ", name, " must be on cpu as q is");
  check_value(x->dim() == 1 && x->size(0) == count, name, " must be [", count, "], got ",
              x->numel(), " elements in ", x->dim(), " dimensions");
  const Tensor values = values_of(*x, ScalarType::Long);
  const auto* first = static_cast<const int64_t*>(values.const_data_ptr());
  return {first, first + count};
}

// One batch entry: keys [start, start + before) of its row or its pages, then the new ones.
struct Entry {
  int64_t start, before;
  int64_t row;                 // of the cache; 0 where paged
  std::vector<int64_t> pages;  // of the positions that it uses
  int64_t first_page;          // the how many-eth of its table row pages[0] is
};

struct Cache {
  const Tensor &k, &v;
  int64_t page_size;  // or the capacity of a row
  bool is_paged;
  std::vector<Entry> entries;
  int64_t num_new;
};

// The pages of positions [start, stop) of entry b, each held against the cache.
void find_pages(const Tensor& table, int64_t b, int64_t start, int64_t stop, const Cache& cache,
                Entry& entry) {
  const int64_t num_pages = cache.k.size(0), width = table.size(1);
  check_value((stop + cache.page_size - 1) / cache.page_size <= width,
              "block_table must have pages for ", stop, " positions, got ", width, " pages of ",
              cache.page_size);
  entry.first_page = start / cache.page_size;
  if (start == stop) return;
  const auto* row = static_cast<const int64_t*>(table.const_data_ptr()) + b * width;
  entry.pages.assign(row + entry.first_page, row + (stop - 1) / cache.page_size + 1);
  for (size_t i = 0; i < entry.pages.size(); ++i) {
    check_value(entry.pages[i] >= 0 && entry.pages[i] < num_pages,
                "block_table must name pages in [0, ", num_pages - 1, "] inside the length, got ",
                entry.pages[i], " in row ", b, ", column ",
                entry.first_page + static_cast<int64_t>(i));
  }
}

// Holds every length and place against the cache, before anything is written.
Cache find_entries(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, int64_t num_new,
                   const Tensor& cache_seqlens, const OptionalTensor& batch_idx,
                   const OptionalTensor& leftpad, const OptionalTensor& block_table) {
  const int64_t batch = q.size(0), rows = k_cache.size(0);
  Cache cache{k_cache, v_cache, k_cache.size(1), block_table.has_value(), {}, num_new};
  const std::vector<int64_t> lengths = integers("cache_seqlens", cache_seqlens, batch);
  const std::vector<int64_t> index = integers("cache_batch_idx", batch_idx, batch);
  const std::vector<int64_t> starts = integers("cache_leftpad", leftpad, batch);
  if (num_new > 0) {
    std::vector<int64_t> sorted = index;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    check_value(twice == sorted.end(), "cache_batch_idx must name no entry twice with k, got ",
                twice == sorted.end() ? 0 : *twice, " twice");
  }
  OptionalTensor table;
  if (block_table) {
    STD_TORCH_CHECK(block_table->dim() == 2 && block_table->size(0) == batch &&
                        block_table->is_cpu() && cache.page_size > 0,
                    kOp, ": block_table must be [", batch,
                    ", pages] on cpu, of pages of 1 or more");
    table = values_of(*block_table, ScalarType::Long);
  }
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = starts.empty() ? 0 : starts[b], length = lengths[b];
    check_value(0 <= start && start <= length, "cache_seqlens must be at least cache_leftpad (",
                start, "), got ", length);
    check_value(length < (int64_t{1} << 31) - num_new, "cache_seqlens must end below 2^31, got ",
                length, " and ", num_new, " new keys");
    const int64_t stop = length + num_new;
    Entry entry{start, length - start, 0, {}, 0};
    if (table) {
      find_pages(*table, b, start, stop, cache, entry);
    } else {
      entry.row = index.empty() ? b : index[b];
      check_value(entry.row >= 0 && entry.row < rows && stop <= cache.page_size,
                  "k_cache must hold entry ", entry.row, " with ", stop, " keys, got ", rows,
                  " entries of ", cache.page_size);
    }
    cache.entries.push_back(std::move(entry));
  }
  return cache;
}

// Elements before position `position` of an entry, KV head 0.
int64_t place_in(const Tensor& x, const Cache& cache, const Entry& entry, int64_t position) {
  if (!cache.is_paged) return entry.row * x.stride(0) + position * x.stride(1);
  const int64_t page = entry.pages[position / cache.page_size - entry.first_page];
  return page * x.stride(0) + position % cache.page_size * x.stride(1);
}

// The angles of rotary positions, in the type that sums run in.
struct Angles {
  Tensor cos, sin;
  bool is_interleaved;

  Rotation at(int64_t position, AttnType type) const {
    const int64_t pairs = cos.size(1);
    const int64_t bytes = position * pairs * (type == AttnType::kFloat64 ? 8 : 4);
    return {static_cast<const char*>(cos.const_data_ptr()) + bytes,
            static_cast<const char*>(sin.const_data_ptr()) + bytes, pairs, is_interleaved};
  }
};

std::optional<Angles> make_angles(const Tensor& q, const OptionalTensor& cos,
                                  const OptionalTensor& sin, bool is_interleaved,
                                  int64_t num_positions) {
  if (!cos) return std::nullopt;
  STD_TORCH_CHECK(sin && cos->dim() == 2 && sin->dim() == 2 && cos->is_cpu() && sin->is_cpu() &&
                      cos->size(0) == sin->size(0) && cos->size(1) == sin->size(1) &&
                      2 * cos->size(1) <= q.size(3),
                  kOp,
                  ": rotary_cos and rotary_sin must be [positions, R / 2] with R <= ", q.size(3));
  check_value(num_positions <= cos->size(0), "rotary_cos must have ", num_positions,
              " positions, got ", cos->size(0));
  return Angles{values_of(*cos, sum_type(q)), values_of(*sin, sum_type(q)), is_interleaved};
}

// Calls write(b, i) for each row i of each entry, on threads where there is much to write.
template <class Write>
void for_each_row(int64_t batch, int64_t rows, int64_t row_elements, const Write& write) {
  constexpr int64_t kGrain = 1 << 16;  // elements, ~20 us of copying
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_elements));
  torch::stable::parallel_for(0, batch * rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) write(i / rows, i % rows);
  });
}

void append(const Tensor& from, Tensor& to, const Cache& cache, const std::optional<Angles>& angles,
            AttnType type) {
  const int64_t heads = from.size(2), width = from.size(3), bytes = attn_element_bytes(type);
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  for_each_row(from.size(0), cache.num_new, heads * width, [&](int64_t b, int64_t i) {
    const Entry& entry = cache.entries[b];
    const Rotation rotation = angles ? angles->at(entry.before + i, type) : Rotation{};
    const char* row = source + (b * from.stride(0) + i * from.stride(1)) * bytes;
    char* place = target + place_in(to, cache, entry, entry.start + entry.before + i) * bytes;
    for (int64_t h = 0; h < heads; ++h) {
      write_row(type, rotation, row + h * from.stride(2) * bytes, from.stride(3),
                place + h * to.stride(2) * bytes, to.stride(3), width);
    }
  });
}

// Queries turned by their own positions where a window counts them, else by that of the first new
// key.
Tensor rotate_queries(const Tensor& q, const Cache& cache, const Angles& angles, bool by_position,
                      AttnType type) {
  const int64_t rows = q.size(1), heads = q.size(2), width = q.size(3);
  const int64_t bytes = attn_element_bytes(type);
  Tensor turned = torch::stable::new_empty(q, {q.size(0), rows, heads, width});
  const auto* source = static_cast<const char*>(q.const_data_ptr());
  auto* target = static_cast<char*>(turned.mutable_data_ptr());
  for_each_row(q.size(0), rows, heads * width, [&](int64_t b, int64_t i) {
    const Rotation rotation = angles.at(cache.entries[b].before + (by_position ? i : 0), type);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t from = b * q.stride(0) + i * q.stride(1) + h * q.stride(2);
      write_row(type, rotation, source + from * bytes, q.stride(3),
                target + ((b * rows + i) * heads + h) * width * bytes, 1, width);
    }
  });
  return turned;
}

void set_sequences(const Tensor& q, const Cache& cache, Call& call) {
  FlashAttnArgs& args = call.args;
  const int64_t rows = q.size(1);
  for (size_t i = 0; i < cache.entries.size(); ++i) {
    const Entry& entry = cache.entries[i];
    const auto b = static_cast<int64_t>(i);
    AttnSequence seq{rows, entry.before + cache.num_new, b * rows, 0, b * q.stride(0), 0, 0,
                     0,    b * args.heads * rows,        b};
    if (cache.is_paged) {
      seq.pages = entry.pages.data();
      seq.page_key = entry.start - entry.first_page * cache.page_size;
    } else {
      seq.k = place_in(cache.k, cache, entry, entry.start);
      seq.v = place_in(cache.v, cache, entry, entry.start);
    }
    call.sequences.push_back(seq);
  }
  args.page_size = cache.page_size;
  args.k_page = cache.k.stride(0);
  args.v_page = cache.v.stride(0);
  args.lse_head = rows;
  args.sequences = call.sequences.data();
  args.num_sequences = q.size(0);
}

void check_new(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
               const OptionalTensor& k, const OptionalTensor& v) {
  STD_TORCH_CHECK(k.has_value() == v.has_value(), kOp, ": k and v must be given together");
  if (!k) return;
  const Tensor *news[] = {&*k, &*v}, *caches[] = {&k_cache, &v_cache};
  for (int i = 0; i < 2; ++i) {
    const char* name = i == 0 ? "k" : "v";
    check_rank_and_type(kOp, name, *news[i], 4, q.scalar_type());
    check_size(kOp, name, *news[i], 0, q.size(0));
    check_size(kOp, name, *news[i], 1, k->size(1));
    check_size(kOp, name, *news[i], 2, caches[i]->size(2));
    check_size(kOp, name, *news[i], 3, caches[i]->size(3));
  }
}

std::tuple<Tensor, Tensor> flash_attn_kvcache(
    Tensor q, Tensor k_cache, Tensor v_cache, OptionalTensor k, OptionalTensor v,
    OptionalTensor rotary_cos, OptionalTensor rotary_sin, Tensor cache_seqlens,
    OptionalTensor cache_batch_idx, OptionalTensor cache_leftpad, OptionalTensor block_table,
    OptionalTensor alibi_slopes, OptionalTensor sink, bool rotary_interleaved, double softmax_scale,
    int64_t window_left, int64_t window_right, bool top_left, double softcap) {
  Call call;
  FlashAttnArgs& args = call.args;
  check_rank_and_type(kOp, "q", q, 4, q.scalar_type());
  set_heads(kOp, q, k_cache, v_cache, args);
  check_size(kOp, "v_cache", v_cache, 0, k_cache.size(0));
  check_new(q, k_cache, v_cache, k, v);
  const int64_t num_new = k ? k->size(1) : 0;
  const Cache cache = find_entries(q, k_cache, v_cache, num_new, cache_seqlens, cache_batch_idx,
                                   cache_leftpad, block_table);
  Tensor turned = q;
  if (k) {
    const bool by_position = window_left >= 0 || window_right >= 0;
    int64_t longest = 0;
    for (const Entry& entry : cache.entries) longest = std::max(longest, entry.before);
    const int64_t steps = std::max(num_new, by_position ? q.size(1) : 1);
    const auto angles = make_angles(q, rotary_cos, rotary_sin, rotary_interleaved,
                                    cache.entries.empty() ? 0 : longest + steps);
    append(*k, k_cache, cache, angles, args.type);
    append(*v, v_cache, cache, std::nullopt, args.type);
    if (angles) turned = rotate_queries(q, cache, *angles, by_position, args.type);
  }
  args.q = attn_tensor(turned);
  set_sequences(turned, cache, call);
  set_options(kOp, {softmax_scale, window_left, window_right, top_left, softcap, 0.0}, args);
  set_row_terms(kOp, alibi_slopes, sink, std::nullopt, 0.0, call);
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), v_cache.size(3)});
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(2), q.size(1)}, sum_type(q));
  if (lse.numel() == 0) return {out, lse};
  args.out = out.mutable_data_ptr();
  args.lse = lse.mutable_data_ptr();
  run_flash_attn(args, pick_body(args.type), torch_threads());
  return {out, lse};
}

}  // namespace
}  // namespace mcp::attn

STABLE_TORCH_LIBRARY_IMPL(mcp_kernels, CPU, m) {
  m.impl("flash_attn_kvcache", TORCH_BOX(&mcp::attn::flash_attn_kvcache));
}
