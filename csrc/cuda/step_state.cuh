// One token of the selective scan for the states of one channel: h = exp(dt A) h + dt x B, and the sum of h
// C. Used by the kernels for sequences of one token. Arithmetic and order are those of selective_scan.
#pragma once

#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kStatesAtOnce = 16;

// Returns A log2(e), the rate that `step_states` takes.
__device__ __forceinline__ float rate_of(float A) { return __fmul_rn(A, kLog2e); }

// Advances 16 states by one token and returns the sum of h C. dt: after softplus. input: dt x. Absent states
// have h = 0, B = 0 and C = -0.
__device__ __forceinline__ float step_states(float (&h)[kStatesAtOnce], const float (&rate)[kStatesAtOnce],
                                             float dt, float input, const float (&B)[kStatesAtOnce],
                                             const float (&C)[kStatesAtOnce]) {
    float products[kStatesAtOnce / 2];
#pragma unroll
    for (int i = 0; i < kStatesAtOnce; ++i) {
        h[i] = __fmaf_rn(exp2_unit(__fmul_rn(dt, rate[i])), h[i], __fmul_rn(input, B[i]));
        if (i % 2 == 1) products[i / 2] = pair_product(h[i - 1], h[i], C[i - 1], C[i]);
    }
    return tree_sum<kStatesAtOnce / 2>(products);
}

}  // namespace cuda
}  // namespace apcbatch
