// The recurrence of the selective scan (the walk): a lane's states over the tokens of a tile. For each token,
// h = exp2(dt A) h + (dt x) B, and the lane's partial sum of C h.
//
// It is software-pipelined over blocks of a few tokens. While the states of one block are updated, the
// special-function unit computes the exp2 of the next block, and later operands are loaded from shared
// memory.
#pragma once

#include "scan_tile.cuh"

namespace apcbatch {
namespace cuda {

template <class Sh>
struct Walk {
    static constexpr int N = Sh::N, K = Sh::K, U = Sh::unroll, kPairs = N / 2;
    float A[K][N], h[K][N];  // A times log2(e)

    // decay: exp2(dt A) of the current block. The others are double-buffered for even and odd blocks: dt, dt
    // x, and (B0, B1, C0, C1) ...
    float decay[U][K][N];
    float dt[2][K][U], input[2][K][U];
    float4 bc[2][U][kPairs];

    // Reads K channels of U tokens each, which are contiguous.
    __device__ __forceinline__ static void read(float (&to)[K][U], const float* from) {
        float* flat = &to[0][0];
        if constexpr (K * U == 4) {
            const float4 four = *reinterpret_cast<const float4*>(from);
            flat[0] = four.x, flat[1] = four.y, flat[2] = four.z, flat[3] = four.w;
        } else if constexpr (K * U == 2) {
            const float2 two = *reinterpret_cast<const float2*>(from);
            flat[0] = two.x, flat[1] = two.y;
        } else {
#pragma unroll
            for (int i = 0; i < K * U; ++i) flat[i] = from[i];
        }
    }

    __device__ __forceinline__ static void read_bc(float4 (&to)[kPairs], const float* row) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) to[i] = *reinterpret_cast<const float4*>(row + 4 * i);
    }

    __device__ __forceinline__ void begin(const float* steps, const float* row) {
        read(dt[0], steps);
        read(dt[1], steps + Sh::step_block);
        read(input[0], steps + Sh::inputs);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            read_bc(bc[0][u], row + u * Sh::bc_row);
#pragma unroll
            for (int k = 0; k < K; ++k) {
#pragma unroll
                for (int i = 0; i < N; ++i) decay[u][k][i] = exp2_unit(__fmul_rn(dt[0][k][u], A[k][i]));
            }
        }
    }

    // Processes token u of an even or odd block, for channel k: updates the states, computes their decay for
    // the next block, and returns their partial sum.
    template <int kOdd>
    __device__ __forceinline__ float token(int u, int k) {
        const float later = dt[1 - kOdd][k][u];
        float products[kPairs];
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float4 q = bc[kOdd][u][i / 2];
            float (&rate)[N] = decay[u][k];
            h[k][i] = __fmaf_rn(rate[i], h[k][i], __fmul_rn(input[kOdd][k][u], q.x));
            h[k][i + 1] = __fmaf_rn(rate[i + 1], h[k][i + 1], __fmul_rn(input[kOdd][k][u], q.y));
            rate[i] = exp2_unit(__fmul_rn(later, A[k][i]));
            rate[i + 1] = exp2_unit(__fmul_rn(later, A[k][i + 1]));
            products[i / 2] = pair_product(h[k][i], h[k][i + 1], q.z, q.w);
        }
        return tree_sum<kPairs>(products);
    }

    // Processes an even (kOdd = 0) or odd (1) block.
    template <int kOdd>
    __device__ __forceinline__ void block(const float* steps, const float* row, float* sum) {
        read(dt[kOdd], steps + (kOdd + 2) * Sh::step_block);
        read(input[1 - kOdd], steps + (kOdd + 1) * Sh::step_block + Sh::inputs);
#pragma unroll
        for (int u = 0; u < U; ++u) read_bc(bc[1 - kOdd][u], row + ((kOdd + 1) * U + u) * Sh::bc_row);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float* to = sum + (kOdd * U + u) * Sh::sum_row;
            if constexpr (K == 1) {
                *to = token<kOdd>(u, 0);
            } else {
                const float first = token<kOdd>(u, 0), second = token<kOdd>(u, 1);
                *reinterpret_cast<float2*>(to) = make_float2(first, second);
            }
        }
    }

    // Processes `count` tokens, rounded up to four blocks; the tokens past `count` change nothing.
    __device__ __forceinline__ void tile(const float* steps, const float* row, float* sum, int count) {
        begin(steps, row);
#pragma unroll 1
        for (int r = 0; r < count; r += 4 * U) {
#pragma unroll
            for (int two = 0; two < 2; ++two) {
                block<0>(steps, row, sum);
                block<1>(steps, row, sum);
                steps += 2 * Sh::step_block;
                row += 2 * U * Sh::bc_row;
                sum += 2 * U * Sh::sum_row;
            }
        }
    }
};

}  // namespace cuda
}  // namespace apcbatch
