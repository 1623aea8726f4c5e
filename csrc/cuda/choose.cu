// Softmax with top-k, argmax and log-probabilities of rows of logits.
//
// Invariant: a row's result depends on that row alone. Sums are fixed trees over its columns, and the lower
// index wins a tie. A row with NaN or infinity gives the token -1.
#include <climits>

#include "dependent_launch.cuh"
#include "quads.cuh"
#include "rows.h"

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

// A warp processes a row; a lane holds every 32nd logit.
__global__ void __launch_bounds__(32 * kTopkWarps) softmax_topk_kernel(TopkParams p) {
    let_next_begin();
    await_before();
    const int lane = threadIdx.x % 32;
    const std::int64_t row = std::int64_t(blockIdx.x) * kTopkWarps + threadIdx.x / 32;
    if (row >= p.t) return;
    const float* logits = p.logits + row * p.stride;
    float mine[kMostChoices / 32];
    Best best = none();
    for (int i = 0, at = lane; at < p.n; ++i, at += 32) {
        mine[i] = logits[at];
        best = better(best, Best{mine[i], at});
    }
    const float highest = warp_best(best).value;
    float sum = 0.0f;
    for (int i = 0, at = lane; at < p.n; ++i, at += 32) sum += expf(mine[i] - highest);
    sum = warp_sum(sum);
    for (std::int64_t j = 0; j < p.k; ++j) {
        best = none();
        for (int i = 0, at = lane; at < p.n; ++i, at += 32) best = better(best, Best{mine[i], at});
        best = warp_best(best);
        if (best.index == INT_MAX) best.index = 0;  // all logits are NaN
        if (best.index % 32 == lane) mine[best.index / 32] = -INFINITY;
        if (lane == 0) {
            p.indices[row * p.k + j] = best.index;
            p.weights[row * p.k + j] = expf(best.value - highest) / sum;
        }
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

__global__ void __launch_bounds__(kRowThreads) logprob_kernel(LogprobParams p) {
    const std::int64_t row = blockIdx.x;
    const float* logits = p.logits + row * p.stride;
    Best best = none();
    bool finite = true;
#pragma unroll 8
    for (int at = threadIdx.x; at < p.n; at += kRowThreads) {
        const float logit = logits[at];
        finite = finite && isfinite(logit);
        best = better(best, Best{logit, at});
    }
    best = block_best(best);
    if (p.choose) {
        finite = __syncthreads_and(finite);
        if (threadIdx.x == 0) p.tokens[row] = finite ? best.index : -1;
    }
    if (!p.logprobs) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int at = threadIdx.x; at < p.n; at += kRowThreads) sum += expf(logits[at] - best.value);
    sum = block_sum<kRowThreads>(sum);
    if (threadIdx.x == 0)
        p.logprobs[row] = p.tokens[row] < 0 ? NAN : logits[p.tokens[row]] - best.value - logf(sum);
}

}  // namespace

void softmax_topk(const TopkParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    launch_dependent(softmax_topk_kernel, dim3(unsigned((p.t + kTopkWarps - 1) / kTopkWarps)),
                     32 * kTopkWarps, 0, stream, "softmax_topk", p);
}

void logprob(const LogprobParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    logprob_kernel<<<unsigned(p.t), kRowThreads, 0, stream>>>(p);
    check_launch("logprob");
}

}  // namespace cuda
}  // namespace apcbatch
