// What the codecs' algorithms share: parts of a row, signs in memory, prefetch, the kept error.
// Included inside the namespace of an instruction set, after its rows.

template <class T>
inline Row load_part(const T* from, int count) {
  T padded[kRow] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

// To nearest, ties to even; any NaN becomes the quiet one.
inline void store(BFloat16* to, const Row& row) {
  const IntRow bits = bits_of(row), magnitude = int_and(bits, int_broadcast(0x7fffffff));
  const IntRow odd = int_and(shift_right<16>(bits), int_broadcast(1));
  const IntRow rounded = shift_right<16>(int_add(bits, int_add(odd, int_broadcast(0x7fff))));
  const IntRow halves = where_less(magnitude, 0x7f800001, rounded, int_broadcast(0x7fc0));
  store_halves(reinterpret_cast<uint16_t*>(to), halves);
}

template <class T>
inline void store_part(T* to, const Row& row, int count) {
  T padded[kRow];
  store(padded, row);
  std::memcpy(to, padded, count * sizeof(T));
}

// Packed signs of up to a row; the host is little-endian, so byte j holds elements 8j .. 8j + 7.
inline void store_signs(uint8_t* to, uint32_t signs, int count) {
  std::memcpy(to, &signs, (count + 7) / 8);
}

inline uint32_t load_signs(const uint8_t* from, int count) {
  uint32_t signs = 0;
  std::memcpy(&signs, from, (count + 7) / 8);
  return signs;
}

// Bits of the first `count` elements of a row, count < kRow.
inline uint32_t first_signs(int count) { return (1u << count) - 1; }

// Asks memory for one row, a block ahead of its use. Each sweep asks for one of the two streams, so
// that memory is busy all the time, though only the first sweep would have to wait for it.
template <class T>
inline void prefetch_row(const T* row) {
  constexpr int kLine = 64;
  for (size_t byte = 0; byte < kRow * sizeof(T); byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
  }
}

// Calls row(i, kRow) for every whole row, then row(i, rest) for what is left of `count` elements.
// The count of a whole row is a constant to the compiler.
template <class F>
inline void for_rows(int64_t count, F row) {
  int64_t i = 0;
  for (; i + kRow <= count; i += kRow) row(i, std::integral_constant<int, kRow>());
  if (i < count) row(i, static_cast<int>(count - i));
}

template <class T>
inline Row load_up_to(const T* from, int count) {
  return count == kRow ? load(from) : load_part(from, count);
}

template <class T>
inline void store_up_to(T* to, const Row& row, int count) {
  count == kRow ? store(to, row) : store_part(to, row, count);
}

inline uint32_t signs_up_to(const Row& row, int count) {
  const uint32_t signs = non_negative(row);
  return count == kRow ? signs : signs & first_signs(count);
}

inline float rms(const Sums& sums, int64_t count) {
  return static_cast<float>(std::sqrt(total(sums) / static_cast<double>(count)));
}

constexpr float kMaxFloat = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Second sweep of a 1-bit codec: the new error, from what was carried and the packed bits.
inline void keep_carried(const float* carried, float* error, const uint8_t* bits, float scale,
                         int64_t count, int64_t ahead) {
  for_rows(count, [&](int64_t i, auto n) {
    prefetch_row(error + i + ahead);
    const Row sent = signed_scale(load_signs(bits + i / 8, n), scale);
    store_up_to(error + i, subtract(load_up_to(carried + i, n), sent), n);
  });
}

// Ends a block of a 1-bit codec after its first sweep: writes the scale, clears the bits of its
// padding, and keeps the error unless the block is bad.
inline void finish_block(const float* carried, float* error, uint8_t* bits, float scale,
                         float* scale_out, int64_t count, int64_t block_elements, int64_t ahead) {
  const int64_t used = (count + 7) / 8, all = (block_elements + 7) / 8;
  std::memset(bits + used, 0, all - used);
  if (scale <= kMaxFloat) {
    *scale_out = scale;
    keep_carried(carried, error, bits, scale, count, ahead);
  } else {
    *scale_out = kNan;
  }
}

// Elements of a block that are no padding, and all that lie in it.
template <class Args>
inline int64_t elements_of(const Args& args, int64_t block) {
  return std::min(args.block_size, args.numel - block * args.block_size);
}

template <class Args>
inline int64_t count_of(const Args& args, int64_t block) {
  const int64_t elements = elements_of(args, block);
  if (args.counts == nullptr) return elements;
  return std::max<int64_t>(0, std::min<int64_t>(args.counts[block], elements));
}
