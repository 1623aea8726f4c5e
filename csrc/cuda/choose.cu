// Choice of experts, argmax and log-probabilities of rows of logits.
//
// Invariant: a row's result depends on that row alone. Sums are fixed trees over its columns, and the lower
// index wins a tie. A row with NaN or infinity gives the token -1.
#include <cooperative_groups.h>

#include <climits>

#include "dependent_launch.cuh"
#include "quads.cuh"
#include "rows.h"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {
namespace {

struct Best {
    float value;
    int index;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__device__ __forceinline__ Best none() { return {-INFINITY, INT_MAX}; }

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        best = better(best, Best{__shfl_xor_sync(0xffffffffu, best.value, lane),
                                 __shfl_xor_sync(0xffffffffu, best.index, lane)});
    }
    return best;
}

constexpr int kTopkWarps = 4;

// The two largest values, the larger first.
struct TopTwo {
    float first = -INFINITY, second = -INFINITY;

    __device__ __forceinline__ void add(const TopTwo& other) {
        second = fmaxf(fminf(first, other.first), fmaxf(second, other.second));
        first = fmaxf(first, other.first);
    }
};

// Replaces the scores of all groups but the top_groups by minus infinity. A lane holds every 32nd score in
// `mine`. sums: scratch for a number for each group. The lower group comes first on ties.
__device__ __forceinline__ void keep_top_groups(const TopkParams& p, int lane, float* mine, float* sums) {
    const int columns = int(p.n / p.groups), groups = int(p.groups);
    for (int g = 0; g < groups; ++g) {
        TopTwo top;
        for (int i = 0, at = lane; at < p.n; ++i, at += 32) {
            if (at / columns == g) top.add({mine[i], -INFINITY});
        }
#pragma unroll
        for (int other = 16; other > 0; other /= 2) {
            top.add({__shfl_xor_sync(0xffffffffu, top.first, other),
                     __shfl_xor_sync(0xffffffffu, top.second, other)});
        }
        if (lane == 0) sums[g] = __fadd_rn(top.first, top.second);
    }
    __syncwarp();
    for (int i = 0, at = lane; at < p.n; ++i, at += 32) {
        const int own = at / columns;
        int before = 0;
        for (int g = 0; g < groups; ++g) before += sums[g] > sums[own] || (sums[g] == sums[own] && g < own);
        if (before >= p.top_groups) mine[i] = -INFINITY;
    }
}

// A warp processes a row; a lane holds every 32nd logit or score.
template <bool kSigmoid>
__global__ void __launch_bounds__(32 * kTopkWarps) route_kernel(const __grid_constant__ RoutingParams p) {
    __shared__ float sums[kSigmoid ? kTopkWarps : 1][kSigmoid ? kMostChoices : 1];
    let_next_begin();
    await_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const std::int64_t row = std::int64_t(blockIdx.x) * kTopkWarps + warp;
    if (row >= p.t) return;
    const float* logits = p.logits + row * p.stride;
    float mine[kMostChoices / 32];
    float highest = 0.0f, exponentials = 1.0f;  // of the softmax
    bool finite = true;
    if constexpr (kSigmoid) {
        for (int i = 0, at = lane; at < p.n; ++i, at += 32) {
            mine[i] = __fadd_rn(sigmoid(logits[at]), p.bias[at]);
            finite = finite && isfinite(logits[at]) && isfinite(mine[i]);
        }
        finite = __all_sync(0xffffffffu, finite);
        if (p.top_groups < p.groups) keep_top_groups(p, lane, mine, sums[warp]);
    } else {
        Best best = none();
        for (int i = 0, at = lane; at < p.n; ++i, at += 32) {
            mine[i] = logits[at];
            best = better(best, Best{mine[i], at});
        }
        highest = warp_best(best).value;
        exponentials = 0.0f;
        for (int i = 0, at = lane; at < p.n; ++i, at += 32) exponentials += expf(mine[i] - highest);
        exponentials = warp_sum(exponentials);
    }
    float* weights = p.weights + row * p.k;
    float sum = 0.0f;
    for (std::int64_t j = 0; j < p.k; ++j) {
        Best best = none();
        for (int i = 0, at = lane; at < p.n; ++i, at += 32) best = better(best, Best{mine[i], at});
        best = warp_best(best);
        if (best.index == INT_MAX) best.index = 0;  // all are NaN
        if (best.index % 32 == lane) mine[best.index / 32] = -INFINITY;
        if (lane == 0) {
            const float weight = !kSigmoid ? expf(best.value - highest) / exponentials
                                 : finite  ? sigmoid(logits[best.index])
                                           : NAN;
            sum = __fadd_rn(sum, weight);
            p.indices[row * p.k + j] = best.index;
            weights[j] = weight;
        }
    }
    if (lane != 0) return;
    const float divisor = p.is_normalised ? __fadd_rn(sum, p.eps) : 1.0f;
    for (std::int64_t j = 0; j < p.k; ++j) {
        weights[j] = __fmul_rn(__fdiv_rn(weights[j], divisor), p.scale);
    }
}

constexpr int kRowThreads = 1024;

__device__ __forceinline__ Best block_best(Best best) {
    __shared__ Best parts[kRowThreads / 32];
    best = warp_best(best);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best;
    __syncthreads();
    best = parts[0];
    for (int i = 1; i < kRowThreads / 32; ++i) best = better(best, parts[i]);
    return best;
}

constexpr int kRowBlocks = 8;  // blocks of a row, a cluster; 1 before sm_90

// What a block found in its columns of a row.
struct Found {
    Best best;
    float sum;  // of exp(logit - the largest logit)
    bool finite;
};

// The blocks of a cluster share a row.
template <int kBlocks>
__global__ void __launch_bounds__(kRowThreads) logprob_kernel(const __grid_constant__ LogprobParams p) {
    __shared__ Found found, all;  // by this block; by all blocks of the row
    const auto found_by = [&](int block) -> const Found& {
#if __CUDA_ARCH__ >= 900
        if constexpr (kBlocks > 1) return *cooperative_groups::this_cluster().map_shared_rank(&found, block);
#endif
        return found;
    };
    const auto meet = [] {
#if __CUDA_ARCH__ >= 900
        if constexpr (kBlocks > 1) return cooperative_groups::this_cluster().sync();
#endif
        __syncthreads();
    };
    const std::int64_t row = blockIdx.x / kBlocks;
    const int first = int(blockIdx.x % kBlocks) * kRowThreads + int(threadIdx.x);
    const bool writes = first == 0;
    const float* logits = p.logits + row * p.stride;
    await_before();
    Best best = none();
    bool finite = true;
#pragma unroll 8
    for (int at = first; at < p.n; at += kBlocks * kRowThreads) {
        const float logit = logits[at];
        finite = finite && isfinite(logit);
        best = better(best, Best{logit, at});
    }
    best = block_best(best);
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) found = {best, 0.0f, finite};
    meet();
    if (threadIdx.x < 32) {  // a lane reads what one block found
        const Found theirs = found_by(int(threadIdx.x) % kBlocks);
        const Best highest = warp_best(theirs.best);
        const bool are_finite = __all_sync(0xffffffffu, theirs.finite);
        if (threadIdx.x == 0) all = {highest, 0.0f, are_finite};
    }
    __syncthreads();
    best = all.best;
    finite = all.finite;
    if (p.choose && writes) p.tokens[row] = finite ? best.index : -1;
    if (p.logprobs) {
        float sum = 0.0f;
#pragma unroll 8
        for (int at = first; at < p.n; at += kBlocks * kRowThreads) sum += expf(logits[at] - best.value);
        sum = block_sum<kRowThreads>(sum);
        if (threadIdx.x == 0) found.sum = sum;
        meet();
        if (writes) {
            for (int block = 1; block < kBlocks; ++block) sum = __fadd_rn(sum, found_by(block).sum);
            p.logprobs[row] = p.tokens[row] < 0 ? NAN : logits[p.tokens[row]] - best.value - logf(sum);
        }
    }
    meet();  // no block ends while another one reads what it found
}

}  // namespace

void route(const RoutingParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    const dim3 blocks(unsigned((p.t + kTopkWarps - 1) / kTopkWarps));
    launch_dependent(p.bias ? route_kernel<true> : route_kernel<false>, blocks, 32 * kTopkWarps, 0, stream,
                     "route", p);
}

void logprob(const LogprobParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    const bool clusters = attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9;
    const int blocks = clusters ? kRowBlocks : 1;
    launch_clusters(clusters ? logprob_kernel<kRowBlocks> : logprob_kernel<1>, dim3(unsigned(p.t * blocks)),
                    kRowThreads, blocks, 0, stream, "logprob", p);
}

}  // namespace cuda
}  // namespace apcbatch
