// The ops of a Transformer block by the type of their elements: what an instruction set exports.
//
// Included inside the namespace of an instruction set, last.

void rms_norm(const RmsNormArgs& args, int64_t first, int64_t last) {
  MCP_FOR_ELEMENT(args.type, norm_rows, args, first, last)
}

void rms_norm_bwd(const RmsNormBackwardArgs& args, int64_t first, int64_t last) {
  MCP_FOR_ELEMENT(args.type, norm_parts_bwd, args, first, last)
}

void swiglu(const SwigluArgs& args, int64_t first, int64_t last) {
  MCP_FOR_ELEMENT(args.type, gate_elements, args, first, last)
}

void swiglu_bwd(const SwigluBackwardArgs& args, int64_t first, int64_t last) {
  MCP_FOR_ELEMENT(args.type, gate_elements_bwd, args, first, last)
}

void rotary(const RotaryArgs& args, int64_t first, int64_t last) {
  MCP_FOR_ELEMENT(args.type, rotate_any, args, first, last)
}
