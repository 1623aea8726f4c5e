// Group tokens by expert, and sum the experts' outputs for each token.
#include "dependent_launch.cuh"
#include "experts.h"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kGroupThreads = 256, kGroupWarps = kGroupThreads / 32;
constexpr int kSumThreads = 256;

// A block per expert reads all pairs twice: to count those of each expert before it, and to write its own.
__global__ void __launch_bounds__(kGroupThreads) group_kernel(const __grid_constant__ Grouping p) {
    __shared__ int counts[kMostExperts];
    __shared__ int own[kGroupWarps];  // pairs of the block's expert, of those that a warp reads
    let_next_begin();
    await_before();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.x;
    const int tokens = p.present ? int(min(std::int64_t(p.tokens), *p.present)) : p.tokens;
    const int pairs = tokens * p.per_token;
    for (int i = threadIdx.x; i < p.num_experts; i += kGroupThreads) counts[i] = 0;
    __syncthreads();
    for (int pair = threadIdx.x; pair < pairs; pair += kGroupThreads) {
        const int chosen = int(p.chosen[pair]);
        if (chosen <= expert) atomicAdd(&counts[chosen], 1);
    }
    __syncthreads();
    int place = 0, before = 0;  // pairs and number of the experts before it
    for (int i = lane; i < expert; i += 32) {
        place += counts[i];
        before += counts[i] > 0;
    }
    place = __reduce_add_sync(0xffffffffu, place);
    before = __reduce_add_sync(0xffffffffu, before);
    const bool is_last = expert + 1 == p.num_experts;
    if (threadIdx.x == 0) {
        const int experts = before + (counts[expert] > 0);
        if (counts[expert] > 0) {
            p.groups->expert[before] = expert;
            p.groups->begins[before] = place;
        }
        if (is_last) {
            p.groups->experts = experts;
            p.groups->begins[experts] = pairs;
        }
    }
    if (counts[expert] == 0) return;
    for (int first = 0; first < pairs; first += kGroupThreads) {
        const int pair = first + int(threadIdx.x);
        const bool mine = pair < pairs && int(p.chosen[pair]) == expert;
        const unsigned all = __ballot_sync(0xffffffffu, mine);
        __syncthreads();
        if (lane == 0) own[warp] = __popc(all);
        __syncthreads();
        int at = place;
        for (int i = 0; i < kGroupWarps; ++i) {
            if (i < warp) at += own[i];
            place += own[i];
        }
        if (mine) pairs_of(p.groups)[at + __popc(all & ((1u << lane) - 1))] = pair;
    }
}

// A thread sums four columns of a token.
__global__ void __launch_bounds__(kSumThreads) expert_sum_kernel(ExpertSum p) {
    let_next_begin();
    await_before();
    const int column = (int(blockIdx.x) * kSumThreads + int(threadIdx.x)) * 4;
    const std::int64_t token = blockIdx.y;
    if (column >= p.columns) return;
    float sum[4] = {};
    std::int64_t last = -1;
    const bool there = !p.present || token < *p.present;
    for (int i = 0; there && i < p.per_token; ++i) {
        std::int64_t next = INT64_MAX, pair = -1;  // smallest expert above `last`, and its pair; -1: none
        for (int j = 0; j < p.per_token; ++j) {
            const std::int64_t expert = p.chosen[token * p.per_token + j];
            if (expert > last && expert < next) {
                next = expert;
                pair = token * p.per_token + j;
            }
        }
        if (pair < 0) break;
        float row[4];
        load<4>(p.rows + pair * p.columns + column, row);
        if (p.scale) {
#pragma unroll
            for (int c = 0; c < 4; ++c) row[c] = __fmul_rn(row[c], p.scale[column + c]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float part = __fmul_rn(row[c], p.weights[pair]);
            sum[c] = last < 0 ? part : __fadd_rn(sum[c], part);
        }
        last = next;
    }
    store<4>(sum, p.y + token * p.columns + column);
}

}  // namespace

void group(const Grouping& p, cudaStream_t stream) {
    launch_dependent(group_kernel, dim3(unsigned(p.num_experts)), kGroupThreads, 0, stream, "group", p);
}

void expert_sum(const ExpertSum& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    const unsigned blocks = unsigned((p.columns + 4 * kSumThreads - 1) / (4 * kSumThreads));
    launch_dependent(expert_sum_kernel, dim3(blocks, unsigned(p.tokens)), kSumThreads, 0, stream,
                     "expert_sum", p);
}

}  // namespace cuda
}  // namespace apcbatch
