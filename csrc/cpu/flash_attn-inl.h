// The algorithm of flash attention over the vectors of an instruction set, in the order it builds
// up.
//
// Included inside the namespace of an instruction set, after flash_attn_vector-inl.h, the types
// that derive from its vectors and what is specialised of Factors.

// clang-format off
#include "cpu/flash_attn_gemm-inl.h"
#include "cpu/flash_attn_pack-inl.h"
#include "cpu/flash_attn_scores-inl.h"
#include "cpu/flash_attn_forward-inl.h"
#include "cpu/flash_attn_stream-inl.h"
#include "cpu/flash_attn_backward-inl.h"
// clang-format on
