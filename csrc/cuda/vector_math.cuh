// exp2, softplus, the sigmoid, SiLU and the sum over states of the CUDA kernels. Every operation is an
// explicit intrinsic, so the bits are the same in every kernel, under any compiler flags and unrolling.
// Polynomials: see csrc/vmath.h.
#pragma once

#include <cuda_runtime.h>

namespace apcbatch {
namespace cuda {

constexpr float kLog2e = 1.4426950408889634f;

// 2^x by the special-function unit: error at most 2 ulp; results below 2^-126 become zero.
__device__ __forceinline__ float exp2_unit(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log(1 + u) for u in [0, 1]: degree 8, relative error 2^-22.1 (tools/fit_polynomials.py).
__device__ __forceinline__ float log1p_unit(float u) {
    float p = __fmaf_rn(-0x1.1f9d04p-7f, u, 0x1.707bc0p-5f);
    p = __fmaf_rn(p, u, -0x1.be86c4p-4f);
    p = __fmaf_rn(p, u, 0x1.6d8022p-3f);
    p = __fmaf_rn(p, u, -0x1.f682f8p-3f);
    p = __fmaf_rn(p, u, 0x1.54d41cp-2f);
    p = __fmaf_rn(p, u, -0x1.fffb3ap-2f);
    return __fmaf_rn(__fmul_rn(p, u), u, u);
}

// max(x, 0), NaN for NaN.
__device__ __forceinline__ float positive_part(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|).
__device__ __forceinline__ float softplus(float x) {
    return __fadd_rn(positive_part(x), log1p_unit(exp2_unit(__fmul_rn(fabsf(x), -kLog2e))));
}

// 1 / (1 + e^-x), the reciprocal within 1 ulp.
__device__ __forceinline__ float sigmoid(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.0f, exp2_unit(__fmul_rn(x, -kLog2e)))));
    return r;
}

// x / (1 + e^-x).
__device__ __forceinline__ float silu(float x) { return __fmul_rn(x, sigmoid(x)); }

// Sum over states, in the same order in every kernel: h C of two adjacent states, then a balanced tree over
// the pairs of 16 states, then the groups of 16 in ascending order. Absent states have C = -0.
__device__ __forceinline__ float pair_product(float h0, float h1, float c0, float c1) {
    return __fmaf_rn(h1, c1, __fmul_rn(h0, c0));
}
template <int kCount>
__device__ __forceinline__ float tree_sum(const float* of) {
    if constexpr (kCount == 1) {
        return of[0];
    } else {
        return __fadd_rn(tree_sum<kCount / 2>(of), tree_sum<kCount / 2>(of + kCount / 2));
    }
}

}  // namespace cuda
}  // namespace apcbatch
