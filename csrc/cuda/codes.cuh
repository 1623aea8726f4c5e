// Decodes codes in registers, and adds steps of fixed-order accumulation with decoded weights: the bits of
// chain_steps.cuh. Needs sm_90.
#pragma once

#include <cuda_bf16.h>

#include "chain_steps.cuh"
#include "codes.h"

namespace apcbatch {
namespace cuda {

// Products and differences of two pairs of bfloat16.
__device__ __forceinline__ std::uint32_t times(std::uint32_t a, std::uint32_t b) {
    const __nv_bfloat162 pair =
        __hmul2_rn(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t minus(std::uint32_t a, std::uint32_t b) {
    const __nv_bfloat162 pair =
        __hsub2_rn(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const std::uint32_t&>(pair);
}

// Returns the weights of a lane's four codes in a step, in the order of their inputs. codes: the lane's word;
// of 4 bits, that of two steps. scale: see Coding. The arithmetic is that of bfloat16: codes and scales are
// exact in it, so that a product is rounded once. The device's conversions are slower.
template <CodeKind kKind>
__device__ __forceinline__ uint2 decoded(std::uint32_t codes, float scale, int step) {
    const std::uint32_t bits = __float_as_uint(scale), scales = __byte_perm(bits, bits, 0x3232);
    const auto scaled = [&](std::uint32_t pair) { return times(pair, scales); };
    if constexpr (kKind == CodeKind::fp8) {
        // The bits of a code as the lowest bits of an exponent, and the highest of a mantissa: 2^-120 code.
        return make_uint2(scaled((codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u)),
                          scaled((codes << 4 & 0x07f007f0u) | (codes << 8 & 0x80008000u)));
    } else if constexpr (kKind == CodeKind::int8) {
        // 128 + the lower 7 bits, less 128, or 256 if the code is negative.
        const auto whole = [](std::uint32_t pair) {
            return minus((pair & 0x007f007fu) | 0x43004300u, (pair & 0x00800080u) | 0x43004300u);
        };
        return make_uint2(scaled(whole(codes >> 8)), scaled(whole(codes)));
    } else {
        // 128 + 8 + the code, less 128 + 8 + zero.
        const std::uint32_t zeros = __byte_perm(bits, 0x43434343u, 0x4040);
        const auto whole = [&](int shift) {
            return minus((codes >> shift & 0x000f000fu) ^ 0x43084308u, zeros);
        };
        return make_uint2(scaled(whole(step % 2 * 8)), scaled(whole(step % 2 * 8 + 4)));
    }
}

// Returns the offset of the codes of a step in a row of a slice, in the swizzled layout.
template <CodeKind kKind>
__device__ __forceinline__ int code_at(int row, int step) {
    if constexpr (kKind == CodeKind::int4)
        return row * code_row(kKind) + ((step / 2 ^ row / 2 % 4) << 4);
    else
        return chunk_at(row, step);
}

// Offsets of a lane's codes and of its inputs of x, per step of half a slice of codes.
template <CodeKind kKind>
struct LaneCodes {
    int row, at[kSliceSteps], x[kSliceSteps];

    __device__ __forceinline__ LaneCodes() : row(row_in_place(threadIdx.x % 32 / 4)) {
        const int quarter = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kSliceSteps; ++i) {
            at[i] = code_at<kKind>(row, i) + quarter * 4;
            x[i] = chunk_at(row, 2 * i) + quarter * 4;
        }
    }
};

// add_slice with the codes of half a slice, 0 or 1, and a slice of x. low, high: octets of codes, in the
// swizzled layout. low_scales, high_scales: of the lane's rows, by group; pitch: floats between groups.
template <CodeKind kKind, int kTiles, int kSums>
__device__ __forceinline__ void add_codes(float (&sums)[kSums][4], const LaneCodes<kKind>& lane, int half,
                                          const unsigned char* low, const unsigned char* high,
                                          const float* low_scales, const float* high_scales, int pitch,
                                          int shift, const unsigned char* x, int steps) {
    static_assert(kTiles <= kSums, "a sum for each octet of x");
    std::uint32_t lows[kSliceSteps], highs[kSliceSteps];
    uint2 xs[kSliceSteps][kTiles];
    float scales[2][kSliceSteps / 2];
#pragma unroll
    for (int i = 0; i < kSliceSteps; ++i) {
        const int at = lane.at[i] ^ half * (code_row(kKind) / 2);
        lows[i] = *reinterpret_cast<const std::uint32_t*>(low + at);
        highs[i] = *reinterpret_cast<const std::uint32_t*>(high + at);
        if (i % 2 == 0) {
            const int group = ((half * kSliceInputs + i * 16) >> shift) * pitch;
            scales[0][i / 2] = low_scales[group];
            scales[1][i / 2] = high_scales[group];
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            const unsigned char* its = x + j * kOctetBytes;
            xs[i][j].x = *reinterpret_cast<const std::uint32_t*>(its + lane.x[i]);
            xs[i][j].y = *reinterpret_cast<const std::uint32_t*>(its + (lane.x[i] ^ 16));
        }
    }
#pragma unroll
    for (int i = 0; i < kSliceSteps; ++i) {
        if (i >= steps) break;
        const uint2 one = decoded<kKind>(lows[i], scales[0][i / 2], i),
                    other = decoded<kKind>(highs[i], scales[1][i / 2], i);
        const std::uint32_t a[4] = {one.x, other.x, one.y, other.y};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) multiply_add(sums[j], a, xs[i][j].x, xs[i][j].y);
    }
}

}  // namespace cuda
}  // namespace apcbatch
