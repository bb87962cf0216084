// The vocabulary that the codecs' algorithms are written in, once; each instruction set defines it
// in codec_rows_<isa>-inl.h, inside its own namespace.
//
//   Row, IntRow, ByteRow                       32 float32, 32 int32, 32 bytes
//   Sums, Peak                                 32 float64 sums, 32 magnitudes; zero when made
//   Row load(const T*); void store(T*, Row)    T float or Float16; load takes BFloat16 too
//   void store_halves(uint16_t*, IntRow)       the low 16 bits, which must be all there are
//   Row broadcast(float)
//   Row add / subtract / multiply / divide(Row, Row)     each lane rounded once
//   Row clamp(Row, float largest)              to [-largest, largest]; no NaN
//   uint32_t non_negative(Row)                 bit i: element i >= 0, so 0 for NaN
//   Row signed_scale(uint32_t bits, float s)   element i: bit i ? s : -s
//   void add_squares(Sums&, Row); double total(Sums)     lane l + lane l + 16, then 8, 4, 2, 1
//   void raise(Peak&, Row); uint32_t highest(Peak)       bits of |x|: a NaN is above infinity
//   IntRow bits_of(Row); Row row_of(IntRow)    the same bits
//   IntRow to_int(Row); Row to_float(IntRow)   nearest, ties to even, |x| < 2^22; exact
//   IntRow int_broadcast(uint32_t), int_add, int_and, int_or(IntRow, IntRow)
//   IntRow shift_left<n>, shift_right<n>(IntRow)         zeros come in
//   IntRow where_less(IntRow a, int32_t limit, IntRow yes, IntRow no)    signed a < limit
//   ByteRow to_bytes(IntRow)                   the low byte of each
//   IntRow from_bytes, from_signed_bytes(ByteRow)
//   ByteRow load_bytes(const uint8_t*); void store_bytes(uint8_t*, ByteRow)
//   ByteRow load_nibbles(const uint8_t*)       16 bytes, the low half first; zeros above
//   void store_nibbles(uint8_t*, ByteRow)      the low half of each byte
//   ByteRow sign_extend_nibbles(ByteRow)
#pragma once

namespace mcp {

// Lanes of the sum, elements of a row, bits of a word of signs.
constexpr int kRow = 32;

}  // namespace mcp
