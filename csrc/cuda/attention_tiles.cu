// Causal attention over a paged KV cache on tensor cores: see paged_attention.cu for the definition.
//
// A warp computes 16 (query, head) rows that share a kv head; a block has one warp or several. On Hopper four
// warps multiply together as a warpgroup, with the same bits. Pages of 64 keys are processed in ascending
// order. Shared memory has two stages: the next page is copied while this one is multiplied.
//
// A page's scores are one chain of products over head_dim. Its weights are rounded to bfloat16 and summed in
// a fixed order. The weighted values are accumulated in one chain over the keys. Keys that a row does not see
// have weight 0, which changes no bit unless a value is infinite or NaN. The chain restarts every
// kSplitTokens keys, and the parts are joined as in attention_part.cuh. So a query's bits depend on its
// absolute position and on the keys up to it, not on its tile.
#include "async_copy.cuh"
#include "attention_part.cuh"
#include "attention_tiles.h"
#include "matrix_unit.cuh"
#include "shared_barrier.cuh"
#include "vector_math.cuh"
#include "warpgroup_unit.cuh"

namespace apcbatch {
namespace cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kWarpRows = 16;
// Warps of a block for chunks of many rows: as many as fit in shared memory.
template <int kDim>
constexpr int kManyWarps = kDim <= 128 ? 8 : 4;
constexpr int kPagesOfSplit = int(kSplitTokens / kPageTokens);
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
struct Rows {
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
__device__ __forceinline__ void add_page(Rows<S::kTiles>& rows, const Queries& queries,
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

// Running totals of a lane's rows over the splits so far. The weighted values are in shared memory, private
// to the lane.
template <int kTiles>
struct Totals {
    float highest[2], sum[2];
    float* out;

    __device__ __forceinline__ void clear(float* memory) {
        out = memory + threadIdx.x / 32 * (kTiles * 4 * 32) + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) out[i * 32] = 0.0f;
        highest[0] = highest[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }

    __device__ __forceinline__ void join(const Rows<kTiles>& later) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (later.highest[r] == -INFINITY) continue;
            const Joint joint(highest[r], sum[r], later.highest[r], later.sum[r]);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    float& at = out[(n * 4 + i) * 32];
                    at = joint.out(at, later.out[n][i]);
                }
            }
            highest[r] = joint.highest;
            sum[r] = joint.sum;
        }
    }
};

// Query, head and last visible key of a lane's row. A row past the end sees no key.
struct Row {
    bool there;
    std::int64_t query, head, last_key;

    __device__ __forceinline__ Row(const PagedAttention& p, std::int64_t sequence, std::int64_t kv_head,
                                   std::int64_t row, std::int64_t rows) {
        const int heads_each = int(p.heads / p.kv_heads);
        there = row < rows;
        query = p.cu_seqlens[sequence] + row / heads_each;
        head = kv_head * heads_each + row % heads_each;
        last_key = there ? p.context[sequence] + row / heads_each : -1;
    }
};

template <class S>
__device__ __forceinline__ void attend(const PagedAttention& p) {
    extern __shared__ __align__(16) unsigned char memory[];
    unsigned char* const queries =
        memory + (S::kGroup ? (kOctetBytes - shared_address(memory) % kOctetBytes) % kOctetBytes : 0);
    unsigned char* const stages = queries + S::kQueries;
    constexpr bool kParts = S::kWarps == 1;
    const int heads_each = int(p.heads / p.kv_heads), head_dim = int(p.head_dim);
    const std::int64_t sequence = blockIdx.y, kv_head = blockIdx.x % p.kv_heads;
    const std::int64_t block = blockIdx.x / p.kv_heads;  // kParts: split; else tile, the longest first
    const std::int64_t tile = kParts ? 0 : gridDim.x / p.kv_heads - 1 - block;
    const std::int64_t rows = (p.cu_seqlens[sequence + 1] - p.cu_seqlens[sequence]) * heads_each;
    if (tile * S::kRows >= rows) return;
    const int lane = threadIdx.x % 32;
    const std::int64_t warp_row = tile * S::kRows + threadIdx.x / 32 * kWarpRows;
    const Row mine[2] = {Row(p, sequence, kv_head, warp_row + lane / 4, rows),
                         Row(p, sequence, kv_head, warp_row + lane / 4 + 8, rows)};
    const std::int64_t last_key[2] = {mine[0].last_key, mine[1].last_key};
    const auto query_of = [&](const Row& row) {
        return static_cast<const Bf16*>(p.q) + row.query * p.q_stride + row.head * head_dim;
    };
    std::uint32_t q[S::kGroup ? 1 : S::kDim / 16][4];
    if constexpr (S::kGroup) {
        constexpr int kChunks = S::kDim / kChunk;
        for (int at = threadIdx.x; at < S::kRows * kChunks; at += S::kThreads) {  // with the first page
            const int its = at / kChunks, column = at % kChunks * kChunk;
            const Row row(p, sequence, kv_head, tile * S::kRows + its, rows);
            const bool there = row.there && column < head_dim;
            copy_chunk(queries + place_of<S>(its, column), there ? query_of(row) + column : p.q, there);
        }
    } else {
#pragma unroll
        for (int k = 0; k < S::kDim / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Row& row = mine[i % 2];
                const int column = k * 16 + i / 2 * 8 + lane % 4 * 2;
                const bool there = row.there && column < head_dim;
                q[k][i] = there ? *reinterpret_cast<const std::uint32_t*>(query_of(row) + column) : 0u;
            }
        }
    }
    // The keys that any row of the block sees, and those that any row of the warp sees.
    const std::int64_t context = p.context[sequence];
    const std::int64_t last = min(rows, (tile + 1) * S::kRows) - 1,
                       warp_last = min(rows, warp_row + kWarpRows) - 1;
    const std::int64_t all = context + last / heads_each + 1;
    const std::int64_t end = kParts ? min(all, (block + 1) * kSplitTokens) : all;
    const std::int64_t warp_end = warp_row < rows ? context + warp_last / heads_each + 1 : 0;
    const int first_page = kParts ? int(block) * kPagesOfSplit : 0;
    const int pages = int((end + kPageTokens - 1) / kPageTokens);
    if (kParts && first_page >= pages) return;
    const std::int64_t* table = p.page_table + sequence * p.page_table_stride;
    const auto copy = [&](int page) {
        const int keys = int(min(std::int64_t(kPageTokens), end - std::int64_t(page) * kPageTokens));
        copy_page<S>(p, table[page], kv_head, keys, stages + page % 2 * (2 * S::kPage));
    };
    Rows<S::kTiles> part;
    Totals<S::kTiles> totals;
    part.clear();
    if (!kParts) totals.clear(reinterpret_cast<float*>(stages + S::kStages));
    if (first_page < pages) copy(first_page);
    for (int page = first_page; page < pages; ++page) {
        wait_for_copies<0>();
        if constexpr (S::kGroup) show_to_products();
        __syncthreads();  // this page has arrived for all threads, and none uses the previous one any more
        if (page + 1 < pages) copy(page + 1);
        const std::int64_t first = std::int64_t(page) * kPageTokens;
        const unsigned char* const stage = stages + page % 2 * (2 * S::kPage);
        if constexpr (S::kGroup) {
            add_page<S>(part, queries, stage, first, last_key, p.scale);
        } else if (first < warp_end) {
            add_page<S>(part, q, stage, first, last_key, p.scale);
        }
        if (!kParts && (page % kPagesOfSplit == kPagesOfSplit - 1 || page + 1 == pages)) {
            totals.join(part);
            part.clear();
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (!mine[r].there) continue;
        if (kParts) {
            const std::int64_t at = (sequence * p.heads + mine[r].head) * num_splits(p.max_context) + block;
            float* to = p.parts + at * (head_dim + 2);
#pragma unroll
            for (int n = 0; n < S::kTiles; ++n) {
                const int column = n * 8 + lane % 4 * 2;
                if (column >= head_dim) break;
                to[column] = part.out[n][2 * r];
                to[column + 1] = part.out[n][2 * r + 1];
            }
            if (lane % 4 == 0) {
                to[head_dim] = part.highest[r];
                to[head_dim + 1] = part.sum[r];
            }
            continue;
        }
        Bf16* to = static_cast<Bf16*>(p.out) + (mine[r].query * p.heads + mine[r].head) * head_dim;
#pragma unroll
        for (int n = 0; n < S::kTiles; ++n) {
            const int column = n * 8 + lane % 4 * 2;
            if (column >= head_dim) break;
            const float* from = totals.out + (n * 4 + 2 * r) * 32;
            *reinterpret_cast<std::uint32_t*>(to + column) =
                join_narrowed(from[0] / totals.sum[r], from[32] / totals.sum[r]);
        }
    }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    attention_tile_kernel(const __grid_constant__ PagedAttention p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    attend<S>(p);
#else
    if constexpr (!S::kGroup) attend<S>(p);
#endif
}

template <class S>
void launch(const PagedAttention& p, std::int64_t blocks, cudaStream_t stream) {
    const auto kernel = attention_tile_kernel<S>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes),
          "the shared memory of attention_tiles");
    kernel<<<dim3(unsigned(blocks * p.kv_heads), unsigned(p.num_sequences)), S::kThreads, S::kBytes,
             stream>>>(p);
    check_launch("attention_tiles");
}

// Returns true if warpgroups multiply: the device has them, and queries are aligned to 16 bytes.
bool takes_groups(const PagedAttention& p) {
    return attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9 &&
           attribute_of_device(cudaDevAttrComputeCapabilityMinor) == 0 && p.q_stride % kChunk == 0 &&
           reinterpret_cast<std::uintptr_t>(p.q) % 16 == 0;
}

template <int kDim>
void launch_dim(PagedAttention p, cudaStream_t stream) {
    p.scale *= kAttentionLog2e;
    if (p.parts) return launch<Shape<kDim, 1>>(p, num_splits(p.max_context), stream);
    const auto launch_many = [&](auto shape) {
        using Many = decltype(shape);
        launch<Many>(p, (p.max_new * (p.heads / p.kv_heads) + Many::kRows - 1) / Many::kRows, stream);
    };
    takes_groups(p) ? launch_many(GroupShape<kDim>()) : launch_many(Shape<kDim, kManyWarps<kDim>>());
}

// Returns true if the addresses are aligned: rows of each head in the cache to 16 bytes, queries to 4 bytes.
bool is_aligned(const PagedAttention& p) {
    const auto multiple = [](const void* address, std::uintptr_t of) {
        return reinterpret_cast<std::uintptr_t>(address) % of == 0;
    };
    return p.head_dim % 16 == 0 && p.q_stride % 2 == 0 && multiple(p.q, 4) && multiple(p.out, 4) &&
           multiple(p.k_cache, 16) && multiple(p.v_cache, 16);
}

}  // namespace

bool takes_tiles(const PagedAttention& p) {
    if (p.q_dtype == DType::float32 || p.head_dim > 256 || !is_aligned(p)) return false;
    const int needed =
        p.head_dim <= 128 ? Shape<128, kManyWarps<128>>::kBytes : Shape<256, kManyWarps<256>>::kBytes;
    return attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 8 &&
           attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= needed;
}

void attention_tiles(const PagedAttention& p, cudaStream_t stream) {
    if (p.head_dim <= 64) return launch_dim<64>(p, stream);
    if (p.head_dim <= 128) return launch_dim<128>(p, stream);
    launch_dim<256>(p, stream);
}

}  // namespace cuda
}  // namespace apcbatch
