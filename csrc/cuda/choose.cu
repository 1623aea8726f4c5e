// Choice of experts, argmax and log-probabilities of rows of logits.
//
// Invariant: a row's result depends on that row alone. Sums are fixed trees over its columns, and the lower
// index wins a tie. A row with NaN or infinity gives the token -1.
#include <cooperative_groups.h>

#include <climits>

#include "dependent_launch.cuh"
#include "experts.h"
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

// Numbers that are ordered like floats, in which -0 and 0 are equal. No float is NaN.
__device__ __forceinline__ unsigned ordered(float value) {
    const unsigned bits = __float_as_uint(__fadd_rn(value, 0.0f));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// No value is NaN.
__device__ __forceinline__ Best warp_best(Best best) {
    const unsigned mine = ordered(best.value), highest = __reduce_max_sync(0xffffffffu, mine);
    const int index = int(__reduce_min_sync(0xffffffffu, mine == highest ? unsigned(best.index) : INT_MAX));
    const unsigned its = __ballot_sync(0xffffffffu, mine == highest && best.index == index);
    return {__shfl_sync(0xffffffffu, best.value, __ffs(int(its)) - 1), index};
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

// Logits or scores of a row: lane l holds those of the columns l, l + 32, ...
template <int kEach>
struct Held {
    float of[kEach];

    // Calls use(index, column) for each column of the lane.
    template <class Use>
    __device__ __forceinline__ static void each(std::int64_t columns, int lane, Use use) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (lane + i * 32 < columns) use(i, lane + i * 32);
        }
    }

    // Replaces the scores of all groups but the top_groups by minus infinity. sums: scratch for a number for
    // each group. The lower group comes first on ties.
    __device__ __forceinline__ void keep_top_groups(const RoutingParams& p, int lane, float* sums) {
        const int columns = int(p.n / p.groups), groups = int(p.groups);
        for (int g = 0; g < groups; ++g) {
            TopTwo top;
            each(p.n, lane, [&](int i, int at) {
                if (at / columns == g) top.add({of[i], -INFINITY});
            });
#pragma unroll
            for (int other = 16; other > 0; other /= 2) {
                top.add({__shfl_xor_sync(0xffffffffu, top.first, other),
                         __shfl_xor_sync(0xffffffffu, top.second, other)});
            }
            if (lane == 0) sums[g] = __fadd_rn(top.first, top.second);
        }
        __syncwarp();
        each(p.n, lane, [&](int i, int at) {
            const int own = at / columns;
            int before = 0;
            for (int g = 0; g < groups; ++g)
                before += sums[g] > sums[own] || (sums[g] == sums[own] && g < own);
            if (before >= p.top_groups) of[i] = -INFINITY;
        });
    }
};

// Chooses and weights the experts of a row, by a warp, and writes them in ascending order. sums: see Held.
// Calls use(place, column) for each in one lane. No column is chosen twice; NaN counts as minus infinity.
template <bool kSigmoid, int kEach, class Use>
__device__ __forceinline__ void route_row(const RoutingParams& p, std::int64_t row, float* sums, Use use) {
    const int lane = threadIdx.x % 32;
    const float* logits = p.logits + row * p.stride;
    Held<kEach> mine;
    unsigned chosen = 0;  // a bit for each of the lane's columns
    const auto each = [&](auto with) { mine.each(p.n, lane, with); };
    float highest = 0.0f, exponentials = 1.0f;  // of the softmax
    bool finite = true;
    each([&](int i, int at) { mine.of[i] = logits[at]; });
    if constexpr (kSigmoid) {
        each([&](int i, int at) {
            const float logit = mine.of[i];
            mine.of[i] = __fadd_rn(sigmoid(logit), p.bias[at]);
            finite = finite && isfinite(logit) && isfinite(mine.of[i]);
        });
        finite = __all_sync(0xffffffffu, finite);
        if (p.top_groups < p.groups) mine.keep_top_groups(p, lane, sums);
    } else {
        Best best = none();
        each([&](int i, int at) { best = better(best, Best{mine.of[i], at}); });
        highest = warp_best(best).value;
        exponentials = 0.0f;
        each([&](int i, int) { exponentials += expf(mine.of[i] - highest); });
        exponentials = warp_sum(exponentials);
    }
    const auto weight_of = [&](float score, int column) {
        if constexpr (kSigmoid) return finite ? sigmoid(logits[column]) : NAN;
        return expf(score - highest) / exponentials;
    };
    const auto best_of_lane = [&] {  // of its columns that are not chosen
        Best best = none();
        each([&](int i, int at) {
            if (!(chosen >> i & 1)) best = better(best, Best{mine.of[i], at});
        });
        return best;
    };
    each([&](int i, int) { mine.of[i] = isnan(mine.of[i]) ? -INFINITY : mine.of[i]; });
    Best own = best_of_lane();
    float kept = 0.0f;  // score, then weight, of the choice with the lane's number, of the last 32
    int column = 0;     // of that choice
    float sum = 0.0f;   // of all weights, in the order of the choices
    for (int j = 0; j < p.k; ++j) {
        const unsigned value = ordered(own.value), most = __reduce_max_sync(0xffffffffu, value);
        unsigned its = __ballot_sync(0xffffffffu, value == most);
        if (its & (its - 1)) {
            const unsigned lowest =
                __reduce_min_sync(0xffffffffu, value == most ? unsigned(own.index) : INT_MAX);
            its = __ballot_sync(0xffffffffu, value == most && unsigned(own.index) == lowest);
        }
        const int owner = __ffs(int(its)) - 1;
        const int index = __shfl_sync(0xffffffffu, own.index, owner);
        const float score = __shfl_sync(0xffffffffu, own.value, owner);
        if (j % 32 == lane) column = index, kept = score;
        if (lane == owner) {
            chosen |= 1u << index / 32;
            own = best_of_lane();
        }
        if (j % 32 < 31 && j < p.k - 1) continue;
        if (lane <= j % 32) kept = weight_of(kept, column);
        for (int i = 0; p.is_normalised && i <= j % 32; ++i)
            sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, kept, i));
    }
    const float divisor = p.is_normalised ? __fadd_rn(sum, p.eps) : 1.0f;
    const auto write = [&](int place, float weight, int at) {
        p.weights[row * p.k + place] = __fmul_rn(__fdiv_rn(weight, divisor), p.scale);
        p.indices[row * p.k + place] = at;
        use(place, at);
    };
    int before = 0, place = 0;  // choices among the columns before; before the column of the lane's choice
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const unsigned its = __ballot_sync(0xffffffffu, chosen >> i & 1);
        if (i == column / 32) place = before + __popc(its & ((1u << column % 32) - 1));
        if (p.k > 32 && (chosen >> i & 1)) {
            const int at = lane + i * 32;
            write(before + __popc(its & ((1u << lane) - 1)), weight_of(mine.of[i], at), at);
        }
        before += __popc(its);
    }
    if (p.k <= 32 && lane < p.k) write(place, kept, column);
}

template <bool kSigmoid, int kEach>
__global__ void __launch_bounds__(32 * kTopkWarps) route_kernel(const __grid_constant__ RoutingParams p) {
    __shared__ float sums[kSigmoid ? kTopkWarps : 1][kSigmoid ? kMostChoices : 1];
    let_next_begin();
    await_before();
    const int warp = threadIdx.x / 32;
    const std::int64_t row = std::int64_t(blockIdx.x) * kTopkWarps + warp;
    if (row < p.t) route_row<kSigmoid, kEach>(p, row, sums[kSigmoid ? warp : 0], [](int, int) {});
}

// The same for few tokens, and groups them by expert. A block of a warp for each token.
constexpr int kMostTogether = 32;  // maximum tokens, choices of a token, and groups of experts

template <bool kSigmoid, int kEach>
__global__ void __launch_bounds__(32 * kMostTogether)
    route_together_kernel(const __grid_constant__ RoutingParams p, const std::int64_t* present,
                          Groups* groups) {
    __shared__ float sums[kSigmoid ? kMostTogether : 1][kMostTogether];
    __shared__ alignas(16) int chosen[kMostTogether * kMostTogether];  // by pair; past the last, no expert
    __shared__ unsigned used[kMostExperts / 32];                       // a bit for each expert
    let_next_begin();
    const int thread = int(threadIdx.x), warp = thread / 32, tokens = int(p.t), each = int(p.k);
    const int pairs = each * (present ? int(min(p.t, *present)) : tokens);
    for (int i = thread; i < kMostExperts / 32; i += 32 * tokens) used[i] = 0;
    for (int i = thread; i < tokens * kMostTogether; i += 32 * tokens) chosen[i] = INT_MAX;
    await_before();
    __syncthreads();
    route_row<kSigmoid, kEach>(p, warp, sums[kSigmoid ? warp : 0], [&](int place, int column) {
        if (warp * each < pairs) chosen[warp * each + place] = column;
    });
    __syncthreads();
    const int own = thread < pairs ? chosen[thread] : INT_MAX, word = own / 32;
    const unsigned bit = 1u << own % 32;
    int place = 0, alike = 0;  // pairs of experts before; earlier pairs of the same expert
    if (thread < pairs) {
        for (int i = 0; i < pairs; i += 4) {
            const int4 four = *reinterpret_cast<const int4*>(chosen + i);
            const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                place += others[j] < own;
                alike += others[j] == own && i + j < thread;
            }
        }
        pairs_of(groups)[place + alike] = thread;
        if (alike == 0) atomicOr(&used[word], bit);
    }
    __syncthreads();
    const auto experts_before = [&](int words) {
        int count = 0;
        for (int i = 0; i < words; ++i) count += __popc(used[i]);
        return count;
    };
    if (thread < pairs && alike == 0) {
        const int rank = experts_before(word) + __popc(used[word] & (bit - 1));
        groups->expert[rank] = own;
        groups->begins[rank] = place;
    }
    if (thread == 0) {
        groups->experts = experts_before(kMostExperts / 32);
        groups->begins[groups->experts] = pairs;
    }
}

// Calls run with true if the choice is by sigmoids, and with the columns of a lane.
template <class Run>
void with_routing(const RoutingParams& p, Run run) {
    const auto with_rule = [&](auto sigmoid) {
        if (p.n <= 4 * 32) return run(sigmoid, std::integral_constant<int, 4>());
        if (p.n <= 8 * 32) return run(sigmoid, std::integral_constant<int, 8>());
        if (p.n <= 16 * 32) return run(sigmoid, std::integral_constant<int, 16>());
        run(sigmoid, std::integral_constant<int, int(kMostChoices / 32)>());
    };
    p.bias ? with_rule(std::true_type()) : with_rule(std::false_type());
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

void route(const RoutingParams& p, const std::int64_t* present, Groups* groups, cudaStream_t stream) {
    if (p.t == 0) return;
    const bool together = groups && p.t <= kMostTogether && p.k <= kMostTogether &&
                          p.groups <= kMostTogether && p.n <= kMostExperts;
    with_routing(p, [&](auto sigmoid, auto each) {
        constexpr bool kSigmoid = decltype(sigmoid)::value;
        constexpr int kEach = decltype(each)::value;
        if constexpr (kEach * 32 <= kMostExperts) {
            if (together)
                return launch_dependent(route_together_kernel<kSigmoid, kEach>, dim3(1), 32 * unsigned(p.t),
                                        0, stream, "route", p, present, groups);
        }
        const dim3 blocks(unsigned((p.t + kTopkWarps - 1) / kTopkWarps));
        launch_dependent(route_kernel<kSigmoid, kEach>, blocks, 32 * kTopkWarps, 0, stream, "route", p);
    });
    if (groups && !together) group({int(p.t), int(p.k), int(p.n), p.indices, present, groups}, stream);
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
