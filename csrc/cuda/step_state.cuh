// One token of the selective scan in one state of one channel, for the kernels that compute one token a
// sequence: h = exp(dt A) h + dt x B, y += h C. The arithmetic, and its order, are those of selective_scan.
// Must not know: kernels.
#pragma once

#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

// A state's rate in units of log 2, for `step_state`.
__device__ __forceinline__ float rate_of(float A) { return __fmul_rn(A, kLog2e); }

// dt: after softplus. input: dt x.
__device__ __forceinline__ void step_state(float& h, float& y, float dt, float rate, float input, float B,
                                           float C) {
    h = __fmaf_rn(exp2_unit(__fmul_rn(dt, rate)), h, __fmul_rn(input, B));
    y = __fmaf_rn(h, C, y);
}

}  // namespace cuda
}  // namespace apcbatch
