// Online softmax over a part of the keys, and the join of two parts. The attention kernels share it, as they
// must agree bit for bit.
#pragma once

#include "quads.cuh"
#include "rows.h"

namespace apcbatch {
namespace cuda {

constexpr float kAttentionLog2e = 1.44269504f;  // exponentials are computed as powers of two

// Join of an earlier and a later part: their scale factors, the joint maximum and the joint sum.
struct Joint {
    float mine, theirs, highest, sum;

    __device__ __forceinline__ Joint(float earlier_highest, float earlier_sum, float later_highest,
                                     float later_sum) {
        highest = fmaxf(earlier_highest, later_highest);
        mine = exp2f(earlier_highest - highest);
        theirs = exp2f(later_highest - highest);
        sum = fmaf(earlier_sum, mine, __fmul_rn(later_sum, theirs));
    }

    __device__ __forceinline__ float out(float earlier, float later) const {
        return fmaf(earlier, mine, __fmul_rn(later, theirs));
    }
};

// Softmax over a part of the keys: maximum, sum of exponentials, weighted values (kColumns per lane).
template <int kColumns>
struct Part {
    float highest, sum, out[kColumns];

    __device__ __forceinline__ void clear() {
        highest = -INFINITY;
        sum = 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[c] = 0.0f;
    }

    // Joins a later part. A part without keys changes nothing.
    __device__ __forceinline__ void join(const Part& later) {
        if (later.highest == -INFINITY) return;
        const Joint joint(highest, sum, later.highest, later.sum);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) out[c] = joint.out(out[c], later.out[c]);
        highest = joint.highest;
        sum = joint.sum;
    }
};

}  // namespace cuda
}  // namespace apcbatch
