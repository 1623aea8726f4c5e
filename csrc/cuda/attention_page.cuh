// A page of keys and values in attention on tensor cores: its copy to shared memory, its scores, its weights
// and its weighted values, by single warps or by a warpgroup, with the same bits.
//
// A page's scores are one chain of products over head_dim. Its weights are rounded to bfloat16 and summed in
// a fixed order. Its weighted values continue one chain over the keys. Keys that a row does not see have
// weight 0, which changes no bit unless a value is infinite or NaN.
#pragma once

#include "async_copy.cuh"
#include "element.cuh"
#include "matrix_unit.cuh"
#include "rows.h"
#include "shared_barrier.cuh"
#include "vector_math.cuh"
#include "warpgroup_unit.cuh"

namespace apcbatch {
namespace cuda {

using Bf16 = __nv_bfloat16;

constexpr int kWarpRows = 16;
constexpr int kChunk = 8;  // elements in 16 bytes

// Sizes for heads of up to kDim columns. Rows in shared memory are padded by a chunk to avoid bank conflicts.
template <int kDim_, int kWarps_>
struct Shape {
    static constexpr bool kGroup = false;
    static constexpr int kDim = kDim_, kWarps = kWarps_, kThreads = 32 * kWarps, kRows = kWarpRows * kWarps;
    static constexpr int kBlocks = 1;  // of a multiprocessor, at least
    static constexpr int kPitch = kDim + kChunk, kPage = kPageTokens * kPitch * 2;  // kPage: bytes
    static constexpr int kTiles = kDim / 8;  // tiles of 8 columns in a row
    // Two stages of keys and values; for rows that span several splits, also their running totals.
    static constexpr int kQueries = 0, kStages = 4 * kPage, kTotals = kRows * kDim * 4;
    static constexpr int kBytes = kStages + (kWarps > 1 ? kTotals : 0);
};

// Sizes for a warpgroup: its queries, and pages, are in slices of 64 columns (see warpgroup_unit.cuh).
// Blocks of one warpgroup are faster than those of several, which share the copies of pages.
template <int kDim_>
struct GroupShape {
    static constexpr bool kGroup = true;
    static constexpr int kDim = kDim_, kWarps = 4, kThreads = kWarpgroup, kRows = kWarpgroupRows;
    static constexpr int kBlocks = kDim > 128 ? 1 : kDim > 64 ? 2 : 3;
    static constexpr int kSlices = kDim / kSliceInputs, kSlice = kPageTokens * kSliceRow;  // kSlice: bytes
    static constexpr int kPage = kSlices * kSlice, kTiles = kDim / 8;
    static constexpr int kQueries = kPage, kStages = 4 * kPage, kTotals = kRows * kDim * 4;
    static constexpr int kBytes = kQueries + kStages + kTotals + kOctetBytes;  // the last for the alignment
    static_assert(kPageTokens == kWarpgroupRows, "the queries lie like a page");
};

// Rows of one lane: rows lane / 4 and lane / 4 + 8 of its warp.
template <int kTiles>
struct LaneRows {
    float highest[2], sum[2], out[kTiles][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            highest[r] = -INFINITY;
            sum[r] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
        }
    }
};

__device__ __forceinline__ std::uint32_t join_narrowed(float a, float b) {
    return join(narrow<Bf16>(a), narrow<Bf16>(b));
}

// Place in bytes of a chunk of 8 columns, from `column` on, in a page or in a warpgroup's queries.
template <class S>
__device__ __forceinline__ int place_of(int row, int column) {
    if constexpr (S::kGroup) {
        const int chunk = column / kChunk;
        return chunk / kSliceChunks * S::kSlice + chunk_at(row, chunk % kSliceChunks);
    } else {
        return (row * S::kPitch + column) * int(sizeof(Bf16));
    }
}

// Copies the first `keys` keys and values of a page to a stage, and fills the rest with zeros.
template <class S>
__device__ __forceinline__ void copy_page(const PagedAttention& p, std::int64_t page, std::int64_t kv_head,
                                          int keys, unsigned char* stage) {
    constexpr int kChunks = S::kDim / kChunk;
    const int head_dim = int(p.head_dim), row = int(p.kv_heads) * head_dim;
    const std::int64_t first = page * kPageTokens * row + kv_head * head_dim;
    const Bf16 *k = static_cast<const Bf16*>(p.k_cache) + first,
               *v = static_cast<const Bf16*>(p.v_cache) + first;
#pragma unroll 4
    for (int at = threadIdx.x; at < kPageTokens * kChunks; at += S::kThreads) {
        const int key = at / kChunks, column = at % kChunks * kChunk;
        const bool there = key < keys && column < head_dim;
        const int from = there ? key * row + column : 0;
        unsigned char* const to = stage + place_of<S>(key, column);
        copy_chunk(to, k + from, there);
        copy_chunk(to + S::kPage, v + from, there);
    }
    commit_copies();
}

// Adds the products of the queries and the keys to the scores of a page.
template <class S>
__device__ __forceinline__ void add_scores(float (&scores)[kPageTokens / 8][4],
                                           const std::uint32_t (&q)[S::kDim / 16][4],
                                           const unsigned char* stage) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, within = lane % 8;
    const Bf16* keys =
        reinterpret_cast<const Bf16*>(stage) + (matrix / 2 * 8 + within) * S::kPitch + matrix % 2 * 8;
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k) {
#pragma unroll
        for (int n = 0; n < kPageTokens / 16; ++n) {
            std::uint32_t b[4];
            load_matrices(b, keys + n * 16 * S::kPitch + k * 16);
            multiply_add(scores[2 * n], q[k], b[0], b[1]);
            multiply_add(scores[2 * n + 1], q[k], b[2], b[3]);
        }
    }
}

// The same by a warpgroup, with the queries in shared memory.
template <class S>
__device__ __forceinline__ void add_scores(float (&scores)[kPageTokens / 8][4], const unsigned char* queries,
                                           const unsigned char* stage) {
    auto& sums = reinterpret_cast<float (&)[kPageTokens / 2]>(scores);
    const std::uint64_t q = described(shared_address(queries)), keys = described(shared_address(stage));
    hold(sums);
    begin_products();
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k) {
        const int step = k / kSliceSteps * (S::kSlice / 16) + k % kSliceSteps * kDescribedStep;
        add_step(sums, q + step, keys + step);
    }
    commit_products();
    wait_for_products<0>();
    hold(sums);
}

// Adds the values of a page by their weights to the rows.
template <class S>
__device__ __forceinline__ void add_values(float (&out)[S::kTiles][4],
                                           std::uint32_t (&weights)[kPageTokens / 16][4],
                                           const unsigned char* values) {
    if constexpr (S::kGroup) {
        constexpr int kColumns = S::kDim < 128 ? S::kDim : 128, kApart = S::kSlice;  // of a product
        const unsigned shared = shared_address(values);
        auto& sums = reinterpret_cast<float (&)[S::kDim / kColumns][kColumns / 2]>(out);
#pragma unroll
        for (auto& its : sums) hold(its);
        begin_products();
#pragma unroll
        for (int k = 0; k < kPageTokens / 16; ++k) {
#pragma unroll
            for (int part = 0; part < S::kDim / kColumns; ++part) {
                const unsigned from = shared + part * (kColumns / kSliceInputs) * kApart + k * 16 * kSliceRow;
                add_step<true>(sums[part], weights[k], described_rows(from, kApart));
            }
        }
        commit_products();
        wait_for_products<0>();
#pragma unroll
        for (auto& its : sums) hold(its);
#pragma unroll
        for (auto& its : weights) hold(its);
    } else {
        const int lane = threadIdx.x % 32, matrix = lane / 8, within = lane % 8;
        const Bf16* from =
            reinterpret_cast<const Bf16*>(values) + (matrix % 2 * 8 + within) * S::kPitch + matrix / 2 * 8;
#pragma unroll
        for (int k = 0; k < kPageTokens / 16; ++k) {
#pragma unroll
            for (int n = 0; n < S::kDim / 16; ++n) {
                std::uint32_t b[4];
                load_transposed(b, from + k * 16 * S::kPitch + n * 16);
                multiply_add(out[2 * n], weights[k], b[0], b[1]);
                multiply_add(out[2 * n + 1], weights[k], b[2], b[3]);
            }
        }
    }
}

// Adds the page whose keys begin at position `first`. Row r of the lane sees keys up to last_key[r]. queries:
// see add_scores.
template <class S, class Queries>
__device__ __forceinline__ void add_page(LaneRows<S::kTiles>& rows, const Queries& queries,
                                         const unsigned char* stage, std::int64_t first,
                                         const std::int64_t (&last_key)[2], float scale) {
    const int lane = threadIdx.x % 32;
    float scores[kPageTokens / 8][4] = {};
    add_scores<S>(scores, queries, stage);
    float kept[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int seen = int(min(last_key[r] - first, std::int64_t(kPageTokens - 1)));
        float highest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kPageTokens / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = scores[n][2 * r + i];
                if (n * 8 + lane % 4 * 2 + i > seen) score = -INFINITY;
                highest = fmaxf(highest, score);
            }
        }
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        highest = fmaxf(rows.highest[r], __fmul_rn(highest, scale));
        const float base = highest == -INFINITY ? 0.0f : highest;
        kept[r] = exp2_unit(__fadd_rn(rows.highest[r], -base));
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kPageTokens / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = scores[n][2 * r + i];
                score = exp2_unit(__fmaf_rn(score, scale, -base));
                sum = __fadd_rn(sum, score);
            }
        }
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        rows.sum[r] = __fmaf_rn(rows.sum[r], kept[r], sum);
        rows.highest[r] = highest;
    }
#pragma unroll
    for (int n = 0; n < S::kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.out[n][i] = __fmul_rn(rows.out[n][i], kept[i / 2]);
    }
    std::uint32_t weights[kPageTokens / 16][4];
#pragma unroll
    for (int k = 0; k < kPageTokens / 16; ++k) {
        const auto &low = scores[2 * k], &high = scores[2 * k + 1];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            weights[k][r] = join_narrowed(low[2 * r], low[2 * r + 1]);
            weights[k][2 + r] = join_narrowed(high[2 * r], high[2 * r + 1]);
        }
    }
    add_values<S>(rows.out, weights, stage + S::kPage);
}

}  // namespace cuda
}  // namespace apcbatch
