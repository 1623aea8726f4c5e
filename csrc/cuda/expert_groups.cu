// Group tokens by expert, and sum the experts' outputs for each token.
#include "dependent_launch.cuh"
#include "experts.h"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kGroupThreads = 512, kGroupWarps = kGroupThreads / 32;
constexpr int kSumThreads = 256;

// A warp per expert scans all pairs, 32 at a time: first it counts those of its expert, then it writes them.
__global__ void __launch_bounds__(kGroupThreads) group_kernel(Grouping p) {
    __shared__ int chosen[kMostTaken], counts[kMostExperts];
    let_next_begin();
    await_before();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tokens = p.present ? int(min(std::int64_t(p.tokens), *p.present)) : p.tokens;
    const int pairs = tokens * p.per_token;
    for (int pair = threadIdx.x; pair < kMostTaken; pair += kGroupThreads)
        chosen[pair] = pair < pairs ? int(p.chosen[pair]) : -1;
    __syncthreads();
    for (int expert = warp; expert < p.num_experts; expert += kGroupWarps) {
        int count = 0;
        for (int first = 0; first < pairs; first += 32)
            count += __popc(__ballot_sync(0xffffffffu, chosen[first + lane] == expert));
        if (lane == 0) counts[expert] = count;
    }
    __syncthreads();
    for (int expert = warp; expert < p.num_experts; expert += kGroupWarps) {
        if (counts[expert] == 0) continue;
        int place = 0, before = 0;
        for (int other = 0; other < expert; ++other) {
            place += counts[other];
            before += counts[other] > 0;
        }
        if (lane == 0) {
            p.groups->expert[before] = expert;
            p.groups->begins[before] = place;
        }
        for (int first = 0; first < pairs; first += 32) {
            const bool mine = chosen[first + lane] == expert;
            const unsigned all = __ballot_sync(0xffffffffu, mine);
            if (mine) p.groups->pairs[place + __popc(all & ((1u << lane) - 1))] = first + lane;
            place += __popc(all);
        }
    }
    if (threadIdx.x == 0) {
        int experts = 0;
        for (int expert = 0; expert < p.num_experts; ++expert) experts += counts[expert] > 0;
        p.groups->experts = experts;
        p.groups->begins[experts] = pairs;
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
    launch_dependent(group_kernel, dim3(1), kGroupThreads, 0, stream, "group", p);
}

void expert_sum(const ExpertSum& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    const unsigned blocks = unsigned((p.columns + 4 * kSumThreads - 1) / (4 * kSumThreads));
    launch_dependent(expert_sum_kernel, dim3(blocks, unsigned(p.tokens)), kSumThreads, 0, stream,
                     "expert_sum", p);
}

}  // namespace cuda
}  // namespace apcbatch
