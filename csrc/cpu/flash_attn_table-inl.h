// The functions of an instruction set by type; Floats and Doubles are its vectors.
//
// Included inside the namespace of an instruction set, last.

const FlashAttnBody& flash_attn_body(AttnType type) {
  static constexpr FlashAttnBody kFloat64 = make_body<Doubles, double>();
  static constexpr FlashAttnBody kFloat32 = make_body<Floats, float>();
  static constexpr FlashAttnBody kBFloat16 = make_body<Floats, BFloat16>();
  static constexpr FlashAttnBody kFloat16 = make_body<Floats, Float16>();
  switch (type) {
    case AttnType::kFloat64:
      return kFloat64;
    case AttnType::kBFloat16:
      return kBFloat16;
    case AttnType::kFloat16:
      return kFloat16;
    default:
      return kFloat32;
  }
}
