// The types that collectives add, and how they are rounded.
//
// Includes no CUDA header: the file that includes it brings the CUDA words.
#pragma once

namespace mcp::cuda {
namespace {

// What a T is added in: exact for a T.
__device__ inline float widen_term(float value) { return value; }
__device__ inline double widen_term(double value) { return value; }
__device__ inline float widen_term(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen_term(__half value) { return __half2float(value); }

__device__ inline void round_sum(float sum, float& to) { to = sum; }
__device__ inline void round_sum(double sum, double& to) { to = sum; }
__device__ inline void round_sum(float sum, __nv_bfloat16& to) { to = __float2bfloat16_rn(sum); }
__device__ inline void round_sum(float sum, __half& to) { to = __float2half_rn(sum); }

}  // namespace
}  // namespace mcp::cuda
