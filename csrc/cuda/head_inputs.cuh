// What a token brings to the recurrences over heads (csrc/head_scan.h), in float32: its keys and gates. The
// rules, where S_i is row i of the state:
//
// delta: m = decay sum_i k_i S_i;  u = beta (v - m);  S_i = fma(k_i, u, decay S_i);  o = sum_i q_i S_i
// ssd: u = dt x;  S_i = fma(B_i, u, decay S_i);  y = fma(D, x, sum_i C_i S_i)
#pragma once

#include "heads.h"
#include "quads.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

// Lanes that share a column of a state: lane l has the rows 32 j + 4 l + r, r < 4. A sum over the rows is two
// chains of fma in each lane, over its even rows and over its odd ones, ascending, then the sum of both, then
// lanes that differ in their first bit, second, third.
constexpr int kLanes = 8;

// Norms a row of q or k of the delta rule, of which a lane of the warp has every 32nd column.
template <bool kQuery, int kEach>
__device__ __forceinline__ void norm_key(float (&row)[kEach], std::int64_t key_dim) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum = __fmaf_rn(row[j], row[j], sum);
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(warp_sum(sum), 1e-6f)));
    const float divisor = __fsqrt_rn(float(key_dim));
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        row[j] = __fmul_rn(row[j], factor);
        if constexpr (kQuery) row[j] = __fdiv_rn(row[j], divisor);
    }
}

// Returns decay and beta of the delta rule, or decay and dt. A, dt_bias: a value head's; of_a, of_b: its
// columns of a and b.
template <bool kDelta>
__device__ __forceinline__ float2 gates_of(const HeadScanParams& p, float A, float dt_bias, float of_a,
                                           float of_b) {
    float dt = softplus(__fadd_rn(of_a, dt_bias)), gate = sigmoid(of_b);
    if constexpr (!kDelta) gate = dt = fminf(fmaxf(dt, p.dt_min), p.dt_max);
    return make_float2(exp2_unit(__fmul_rn(__fmul_rn(A, dt), kLog2e)), gate);
}

}  // namespace cuda
}  // namespace apcbatch
