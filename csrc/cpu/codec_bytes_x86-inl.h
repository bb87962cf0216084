// 32 codes as bytes in one AVX2 register, for AVX2 and AVX-512 alike.
// Included inside each one's namespace, after Row and IntRow.

using ByteRow = __m256i;

inline ByteRow load_bytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline void store_bytes(uint8_t* to, ByteRow bytes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
}

inline void store_nibbles(uint8_t* to, ByteRow bytes) {
  const __m256i nibbles = _mm256_and_si256(bytes, _mm256_set1_epi8(15));
  const __m256i pairs = _mm256_maddubs_epi16(nibbles, _mm256_set1_epi16(0x1001));  // low + 16 high
  const __m256i packed = _mm256_packus_epi16(pairs, pairs);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b1000);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(ordered));
}

inline ByteRow load_nibbles(const uint8_t* from) {
  const __m256i wide =
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256i apart = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
  return _mm256_and_si256(apart, _mm256_set1_epi8(15));
}

inline ByteRow sign_extend_nibbles(ByteRow nibbles) {
  const __m256i eight = _mm256_set1_epi8(8);
  return _mm256_sub_epi8(_mm256_xor_si256(nibbles, eight), eight);
}
