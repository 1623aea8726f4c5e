// Steps of a chain: 16 inputs of bfloat16 each, added in the matrix units, out of shared memory. Must not
// know: how what is multiplied comes there.
#pragma once

#include "matrix_unit.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kStepsAtOnce = 4;

// What a lane multiplies in some steps: of two rows of weights, and of one of x, four inputs of each 16.
// Which of the 16 they are is the same for all three, and nothing else matters.
struct Steps {
    uint2 low[kStepsAtOnce], high[kStepsAtOnce], x[kStepsAtOnce];

    __device__ __forceinline__ void load(const unsigned char* at_low, const unsigned char* at_high,
                                         const unsigned char* at_x, int step) {
#pragma unroll
        for (int i = 0; i < kStepsAtOnce; ++i) {
            low[i] = *reinterpret_cast<const uint2*>(at_low + (step + i) * 32);
            high[i] = *reinterpret_cast<const uint2*>(at_high + (step + i) * 32);
            x[i] = *reinterpret_cast<const uint2*>(at_x + (step + i) * 32);
        }
    }
    __device__ __forceinline__ void add(float (&sums)[4], int i) const {
        const std::uint32_t a[4] = {low[i].x, high[i].x, low[i].y, high[i].y};
        multiply_add<__nv_bfloat16>(sums, a, x[i].x, x[i].y);
    }
};

// 16 rows of weights times 8 of x, `steps` times 16 inputs, the next ones on their way while these are
// added. What is there of most_steps, a multiple of kStepsAtOnce, may be read.
__device__ __forceinline__ void add_chain(float (&sums)[4], const unsigned char* low,
                                          const unsigned char* high, const unsigned char* x, int steps,
                                          int most_steps) {
    Steps now, next;
    now.load(low, high, x, 0);
    int step = 0;
#pragma unroll 2
    for (; step + kStepsAtOnce <= steps; step += kStepsAtOnce) {
        next.load(low, high, x, step + kStepsAtOnce < most_steps ? step + kStepsAtOnce : step);
#pragma unroll
        for (int i = 0; i < kStepsAtOnce; ++i) now.add(sums, i);
        now = next;
    }
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
        if (step + i < steps) now.add(sums, i);
    }
}

}  // namespace cuda
}  // namespace apcbatch
