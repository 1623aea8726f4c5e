// Experts of a mixture. Tokens are grouped by expert on the device, without the host, so that a CUDA graph
// can capture the pass. Weights and activations are bfloat16.
#pragma once

#include "launch.h"
#include "products.h"
#include "rows.h"
#include "tensor_map.h"
#ifdef __CUDACC__
#include "element.cuh"
#endif

namespace apcbatch {
namespace cuda {

constexpr int kMostExperts = 512;

// Pairs grouped by expert. A pair is token * per_token + choice. In memory the pairs follow, tokens *
// per_token integers, by expert and ascending within an expert; a pair's place is its index there.
struct Groups {
    int experts;                   // number of experts with at least one pair
    int expert[kMostExperts];      // these experts, ascending
    int begins[kMostExperts + 1];  // place of each expert's first pair; then the number of pairs
};

// Arguments of the grouping. chosen: (tokens, per_token), experts. present: number of real tokens, which come
// first; null: all.
struct Grouping {
    int tokens, per_token, num_experts;
    const std::int64_t* chosen;
    const std::int64_t* present;
    Groups* groups;
};

void group(const Grouping& params, cudaStream_t stream);

__host__ __device__ inline int* pairs_of(Groups* groups) { return reinterpret_cast<int*>(groups + 1); }
__host__ __device__ inline const int* pairs_of(const Groups* groups) {
    return reinterpret_cast<const int*>(groups + 1);
}

// What an expert's product does with its sums. swiglu: y = silu(gate x) * up x; W has the rows of gate, then
// those of up. relu_square: y = max(x W^T, 0)^2. In both the sums are first rounded to bfloat16. none: y = x
// W^T.
enum class Activation : int { none = 0, swiglu = 1, relu_square = 2 };

#ifdef __CUDACC__
// Results of a product, from its sums. They round like a product that stores its sums, followed by silu_mul
// or the square of a ReLU.
__device__ __forceinline__ __nv_bfloat16 squared(float sum) {
    const float up = widen(narrow<__nv_bfloat16>(sum)), relu = up < 0.0f ? 0.0f : up;
    return narrow<__nv_bfloat16>(__fmul_rn(relu, relu));
}
// Has the quotients of `/`, whose branches would keep one quotient waiting for another.
template <int kCount>
__device__ __forceinline__ void gate(const float (&gate_sums)[kCount], const float (&up_sums)[kCount],
                                     __nv_bfloat16 (&y)[kCount]) {
    float gates[kCount], divisors[kCount], quotients[kCount];
    bool are_plain = true;  // nothing between is too small or too large for a float
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        gates[i] = widen(narrow<__nv_bfloat16>(gate_sums[i]));
        divisors[i] = 1.0f + expf(-gates[i]);
        are_plain = are_plain && fabsf(gates[i]) > 0x1p-60f && gates[i] > -60.0f && gates[i] < 0x1p60f;
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisors[i]));
        inverse = __fmaf_rn(__fmaf_rn(-divisors[i], inverse, 1.0f), inverse, inverse);
        quotients[i] = __fmul_rn(gates[i], inverse);
#pragma unroll
        for (int step = 0; step < 2; ++step)
            quotients[i] = __fmaf_rn(__fmaf_rn(-divisors[i], quotients[i], gates[i]), inverse, quotients[i]);
    }
    if (!are_plain) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) quotients[i] = gates[i] / divisors[i];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        y[i] = narrow<__nv_bfloat16>(quotients[i] * widen(narrow<__nv_bfloat16>(up_sums[i])));
}
__device__ __forceinline__ float weighted(float sum, float scale, float routing) {
    return __fmul_rn(__fmul_rn(sum, scale), routing);
}
#endif

// Product of every expert with the rows of its pairs, each element one fixed-order sum (see products.h).
//
// With an activation it reads row pair / per_token of x and writes row place of y, in bfloat16. Without, it
// reads row place of x and writes row pair of y, weighted, in float32, and follows a product with an
// activation of the same groups.
struct ExpertProduct {
    const Groups* groups;
    int tokens, per_token, experts;  // experts: of the mixture
    int in, out;                     // columns of x and of y, multiples of 16
    Activation activation;
    const void* weights;  // (experts) maps of (out or 2 out, in), see ExpertMaps
    const void* x;        // rows of `in` bfloat16, contiguous, aligned to 16 bytes
    void* y;
    // Without an activation: scale (out) or null, routing (tokens, per_token). See weighted.
    const float *scale, *routing;
    Coding coding;  // of the weights; its scales are in the maps
};

// Tensor maps of an expert's weights: with boxes of kExpertBoxRows rows, and paired, with boxes of
// kExpertTileRows rows, half of them gate and half up in a gated product. scales: of encoded weights, with
// boxes of kExpertBoxRows rows of one group.
struct ExpertMaps {
    CUtensorMap chains, tiles, scales;
};
constexpr int kExpertBoxRows = 32, kExpertTileRows = 256;
ExpertMaps expert_maps(const void* weights, const Coding& coding, std::int64_t out, std::int64_t in,
                       bool gated);

void expert_product(const ExpertProduct& params, cudaStream_t stream);

// expert_product with the same bits. takes_expert_tiles: returns true where it is faster and the device
// supports it: with an activation for more than kFewPairs pairs an expert; without one from kFewestTiled
// tokens on, and with at most kShortInputs inputs as soon as all multiprocessors have a tile.
constexpr int kFewPairs = 8, kFewestTiled = 32, kShortInputs = 1024;
bool takes_expert_tiles(const ExpertProduct& params);
void expert_tiles(const ExpertProduct& params, cudaStream_t stream);

// Sum of experts: y (tokens, columns), zero for padding.
struct ExpertSum {
    int tokens, columns;  // columns: a multiple of 4
    ExpertRows experts;
    float* y;
};

void expert_sum(const ExpertSum& params, cudaStream_t stream);

// Returns true if the current device supports these kernels.
bool takes_experts();

}  // namespace cuda
}  // namespace apcbatch
