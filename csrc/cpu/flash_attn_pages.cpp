#include "cpu/flash_attn_pages.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/flash_attn_append.h"

namespace mcp {
namespace {

// Packs keys [first, last) as if row 0 of k and v were k_first and v_first elements in.
void pack_from(const FlashAttnArgs& args, const FlashAttnBody& body, AttnHead& head,
               int64_t k_first, int64_t v_first, int64_t first, int64_t last) {
  AttnSequence seq = *head.sequence;
  seq.k = k_first;
  seq.v = v_first;
  AttnHead own{};
  own.sequence = &seq;
  own.kv_head = head.kv_head;
  own.k_panels = head.k_panels;
  own.v_rows = head.v_rows;
  own.is_finite.store(true, std::memory_order_relaxed);
  body.pack_keys(args, own, first, last, false);
  if (!own.is_finite.load(std::memory_order_relaxed)) {
    head.is_finite.store(false, std::memory_order_relaxed);
  }
}

// Position `key` of a sequence: its page, and the place in it.
struct Place {
  int64_t page, in_page;
};

Place place_of(const FlashAttnArgs& args, const AttnSequence& seq, int64_t key) {
  const int64_t position = seq.page_key + key;
  return {seq.pages[position / args.page_size], position % args.page_size};
}

// Keys [first, last) of one head of x, one row after another in `to`.
void copy_rows(const FlashAttnArgs& args, const AttnHead& head, const AttnTensor& x, int64_t base,
               int64_t page_stride, int64_t width, int64_t first, int64_t last, char* to) {
  const int64_t size = attn_element_bytes(args.type);
  for (int64_t key = first; key < last; ++key, to += width * size) {
    const Place place = place_of(args, *head.sequence, key);
    const char* row =
        static_cast<const char*>(x.data) +
        (base + place.page * page_stride + place.in_page * x.row + head.kv_head * x.head) * size;
    if (x.dim == 1) {
      std::memcpy(to, row, width * size);
    } else {
      for (int64_t d = 0; d < width; ++d) std::memcpy(to + d * size, row + d * x.dim * size, size);
    }
  }
}

// A panel whose keys lie in several pages is packed from a copy of its rows.
void pack_copied(const FlashAttnArgs& args, const FlashAttnBody& body, AttnHead& head,
                 int64_t first, int64_t last) {
  const AttnSequence& seq = *head.sequence;
  const int64_t d = args.head_dim, e = args.value_dim, size = attn_element_bytes(args.type);
  std::vector<char> rows(kAttnPanel * (d + e) * size);
  char* v_rows = rows.data() + kAttnPanel * d * size;
  copy_rows(args, head, args.k, seq.k, args.k_page, d, first, last, rows.data());
  copy_rows(args, head, args.v, seq.v, args.v_page, e, first, last, v_rows);
  FlashAttnArgs copied = args;
  copied.k = {rows.data(), d, 0, 1};
  copied.v = {v_rows, e, 0, 1};
  pack_from(copied, body, head, -first * d, -first * e, first, last);
}

}  // namespace

void pack_keys_of(const FlashAttnArgs& args, const FlashAttnBody& body, AttnHead& head,
                  int64_t first, int64_t last) {
  const AttnSequence& seq = *head.sequence;
  if (seq.pages == nullptr) return body.pack_keys(args, head, first, last, false);
  for (int64_t key = first, count; key < last; key += count) {
    const Place place = place_of(args, seq, key);
    const int64_t run = std::min(args.page_size - place.in_page, last - key);
    count = std::min<int64_t>(kAttnPanel, last - key);
    if (run < count) {
      pack_copied(args, body, head, key, key + count);
      continue;
    }
    // Whole panels, but for the one that ends the keys.
    count = run == last - key ? run : run / kAttnPanel * kAttnPanel;
    pack_from(
        args, body, head, seq.k + place.page * args.k_page + (place.in_page - key) * args.k.row,
        seq.v + place.page * args.v_page + (place.in_page - key) * args.v.row, key, key + count);
  }
}

}  // namespace mcp
