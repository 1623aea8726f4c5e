// Group tokens by expert, and sum the experts' outputs for each token.
#include "dependent_launch.cuh"
#include "experts.h"
#include "quads.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kGroupThreads = 512, kGroupWarps = kGroupThreads / 32;
constexpr int kTogether = 4;  // experts of a block
constexpr int kAhead = 16;    // loads of a lane under way
constexpr int kSumThreads = 256;

// A block reads all pairs twice: to count those of each expert before its own, and to write its own. Its
// warps share the pairs, and each one's are consecutive.
__global__ void __launch_bounds__(kGroupThreads) group_kernel(const __grid_constant__ Grouping p) {
    __shared__ int counts[kMostExperts + kTogether];
    __shared__ int own[kGroupWarps][kTogether];  // pairs of the block's experts, of those that a warp reads
    let_next_begin();
    await_before();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = int(blockIdx.x) * kTogether;
    const int tokens = p.present ? int(min(std::int64_t(p.tokens), *p.present)) : p.tokens;
    const int pairs = tokens * p.per_token, each = (pairs + 32 * kGroupWarps - 1) / (32 * kGroupWarps) * 32;
    const int begin = warp * each, end = min(pairs, begin + each);
    for (int i = threadIdx.x; i < kMostExperts + kTogether; i += kGroupThreads) counts[i] = 0;
    __syncthreads();
    const auto each_pair = [&](auto use) {  // by a whole warp; past the end, no expert
        for (int first = begin + lane; first < begin + each; first += 32 * kAhead) {
            int chosen[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                chosen[i] = first + i * 32 < end ? int(p.chosen[first + i * 32]) : kMostExperts + kTogether;
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (first + i * 32 < begin + each) use(first + i * 32, chosen[i]);
            }
        }
    };
    int mine[kTogether] = {};
    each_pair([&](int, int chosen) {
        if (chosen < expert + kTogether) atomicAdd(&counts[chosen], 1);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) mine[i] += chosen == expert + i;
    });
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
        mine[i] = __reduce_add_sync(0xffffffffu, mine[i]);
        if (lane == i) own[warp][i] = mine[i];
    }
    __syncthreads();
    int place = 0, before = 0;  // pairs and number of the experts before
    for (int i = lane; i < expert; i += 32) {
        place += counts[i];
        before += counts[i] > 0;
    }
    place = __reduce_add_sync(0xffffffffu, place);
    before = __reduce_add_sync(0xffffffffu, before);
    int at[kTogether];  // where this warp writes its next pair of an expert
    bool are_any = false;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
        const int count = counts[expert + i];
        if (threadIdx.x == 0 && count > 0) {
            p.groups->expert[before] = expert + i;
            p.groups->begins[before] = place;
        }
        at[i] = place;
        for (int other = 0; other < warp; ++other) at[i] += own[other][i];
        place += count;
        before += count > 0;
        are_any = are_any || mine[i] > 0;
    }
    if (threadIdx.x == 0 && expert + kTogether >= p.num_experts) {
        p.groups->experts = before;
        p.groups->begins[before] = pairs;
    }
    if (!are_any) return;
    each_pair([&](int pair, int chosen) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const unsigned all = __ballot_sync(0xffffffffu, chosen == expert + i);
            if (chosen == expert + i) pairs_of(p.groups)[at[i] + __popc(all & ((1u << lane) - 1))] = pair;
            at[i] += __popc(all);
        }
    });
}

// A thread sums four columns of a token.
__global__ void __launch_bounds__(kSumThreads) expert_sum_kernel(ExpertSum p) {
    let_next_begin();
    await_before();
    const std::int64_t token = blockIdx.y, column = (int(blockIdx.x) * kSumThreads + int(threadIdx.x)) * 4;
    if (column >= p.columns) return;
    float sum[1][4];
    const int each = p.experts.per_token;
    sum_rows<4>(p.experts.rows + token * each * p.columns + column, each, p.columns, sum);
    if (p.experts.present && token >= *p.experts.present)
        sum[0][0] = sum[0][1] = sum[0][2] = sum[0][3] = 0.0f;
    store<4>(sum[0], p.y + token * p.columns + column);
}

}  // namespace

void group(const Grouping& p, cudaStream_t stream) {
    const unsigned blocks = unsigned((p.num_experts + kTogether - 1) / kTogether);
    launch_dependent(group_kernel, dim3(blocks), kGroupThreads, 0, stream, "group", p);
}

void expert_sum(const ExpertSum& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    const unsigned blocks = unsigned((p.columns + 4 * kSumThreads - 1) / (4 * kSumThreads));
    launch_dependent(expert_sum_kernel, dim3(blocks, unsigned(p.tokens)), kSumThreads, 0, stream,
                     "expert_sum", p);
}

}  // namespace cuda
}  // namespace apcbatch
