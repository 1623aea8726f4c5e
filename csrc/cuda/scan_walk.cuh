// A lane's states and its walk over the tokens of a tile: for each token h = exp2(dt A) h + (dt x) B and the
// sum of C h. It is a software pipeline: while one token's products are summed, the next one's exp2 are under
// way in the special-function unit and its B and C come out of shared memory. Must not know: sequences,
// slots, global memory.
#pragma once

#include "scan_tile.cuh"

namespace apcbatch {
namespace cuda {

template <class Sh>
struct Walk {
    static constexpr int N = Sh::N, S = Sh::S, kAhead = N / 2 < 4 ? N / 2 : 4;
    float A[N], h[N];  // A times log2(e)
    int stage;         // the lane's place among those of its channel

    // The token at hand, and what is fetched ahead of it.
    float decay[N], input;  // exp2(dt A), dt x
    float2 next;            // the next token's step
    float4 bc[kAhead];      // the first pairs of B and C
    float passed[Sh::lag];  // the sums that reach this lane, from the one before it

    __device__ __forceinline__ void begin(const float* step, const float* shared) {
        const float2 first = *reinterpret_cast<const float2*>(step);
        next = *reinterpret_cast<const float2*>(step + Sh::step_row);
        input = first.y;
#pragma unroll
        for (int i = 0; i < N; ++i) decay[i] = exp2_unit(__fmul_rn(first.x, A[i]));
#pragma unroll
        for (int i = 0; i < Sh::lag; ++i) passed[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) bc[i] = *reinterpret_cast<const float4*>(shared + 4 * i);
    }

    // Two states: on by a token, their next decay, and the sum that they add to.
    __device__ __forceinline__ float advance(int i, float4 q, float y) {
        h[i] = __fmaf_rn(decay[i], h[i], __fmul_rn(input, q.x));
        h[i + 1] = __fmaf_rn(decay[i + 1], h[i + 1], __fmul_rn(input, q.y));
        decay[i] = exp2_unit(__fmul_rn(next.x, A[i]));
        decay[i + 1] = exp2_unit(__fmul_rn(next.x, A[i + 1]));
        return __fmaf_rn(h[i + 1], q.w, __fmaf_rn(h[i], q.z, y));
    }

    // The sum at row r, counted from where step and shared point; kRow is r modulo the lag.
    template <int kRow>
    __device__ __forceinline__ float token(const float* step, const float* shared, int r) {
        const float2 after = *reinterpret_cast<const float2*>(step + (r + 2) * Sh::step_row);
        float y = S == 1 || stage == 0 ? 0.0f : passed[kRow % Sh::lag];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float4 q = bc[i % kAhead];
            const int ahead = i + kAhead;
            bc[i % kAhead] = *reinterpret_cast<const float4*>(shared + (r + ahead / (N / 2)) * Sh::bc_row +
                                                              4 * (ahead % (N / 2)));
            y = advance(2 * i, q, y);
        }
        if (S > 1) passed[kRow % Sh::lag] = __shfl_up_sync(0xffffffffu, y, 1);
        input = next.y;
        next = after;
        return y;
    }

    // `count` tokens from the row that steps and bc point at; lanes behind the first begin in the idle rows
    // before it.
    __device__ __forceinline__ void tile(float* steps, const float* bc_rows, int count) {
        float* step = steps - stage * Sh::lag * Sh::step_row;
        const float* shared = bc_rows - stage * Sh::lag * Sh::bc_row;
        begin(step, shared);
#pragma unroll 2
        for (int r = 0; r < Sh::idle; r += Sh::lag) {
            token<0>(step, shared, r);
            if (Sh::lag == 2) token<1>(step, shared, r + 1);
        }
        step += Sh::idle * Sh::step_row;
        shared += Sh::idle * Sh::bc_row;
        int r = 0;
#pragma unroll 1
        for (; r + 2 <= count; r += 2, step += 2 * Sh::step_row, shared += 2 * Sh::bc_row) {
            const float first = token<0>(step, shared, 0), second = token<1>(step, shared, 1);
            if (stage == S - 1) step[0] = first;
            if (stage == S - 1) step[Sh::step_row] = second;
        }
        if (r < count) {
            const float last = token<0>(step, shared, 0);
            if (stage == S - 1) step[0] = last;
        }
    }
};

}  // namespace cuda
}  // namespace apcbatch
