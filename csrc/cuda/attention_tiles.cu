// Causal attention over a paged KV cache on tensor cores: see paged_attention.cu for the definition.
//
// A warp computes 16 (query, head) rows that share a kv head; a block has one warp or several. Pages of 64
// keys are processed in ascending order. Shared memory has two stages: the next page is copied while this one
// is multiplied.
//
// A page's scores are one chain of products over head_dim. Its weights are rounded to bfloat16 and
// summed in a fixed order. The weighted values are accumulated in one chain over the keys. Keys that a row
// does not see have weight 0, which changes no bit. The chain restarts every kSplitTokens keys, and the parts
// are joined as in attention_part.cuh. So a query's bits depend on its absolute position and on the keys up
// to it, not on its tile.
#include "async_copy.cuh"
#include "attention_part.cuh"
#include "attention_tiles.h"
#include "matrix_unit.cuh"
#include "vector_math.cuh"

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
    static constexpr int kDim = kDim_, kWarps = kWarps_, kThreads = 32 * kWarps, kRows = kWarpRows * kWarps;
    static constexpr int kPitch = kDim + kChunk, kPage = kPageTokens * kPitch;
    static constexpr int kTiles = kDim / 8;  // tiles of 8 columns in a row
    // Two stages of keys and values; for rows that span several splits, also their running totals.
    static constexpr int kStagesBytes = 4 * kPage * 2, kTotalsBytes = kRows * kDim * 4;
    static constexpr int kBytes = kStagesBytes + (kWarps > 1 ? kTotalsBytes : 0);
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

// Copies the first `keys` keys and values of a page to a stage, and fills the rest with zeros.
template <class S>
__device__ __forceinline__ void copy_page(const PagedAttention& p, std::int64_t page, std::int64_t kv_head,
                                          int keys, Bf16* stage) {
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
        copy_chunk(stage + key * S::kPitch + column, k + from, there);
        copy_chunk(stage + S::kPage + key * S::kPitch + column, v + from, there);
    }
    commit_copies();
}

// Adds the page whose keys begin at position `first`. Row r of the lane sees keys up to last_key[r].
template <class S>
__device__ __forceinline__ void add_page(Rows<S::kTiles>& rows, const std::uint32_t (&q)[S::kDim / 16][4],
                                         const Bf16* stage, std::int64_t first,
                                         const std::int64_t (&last_key)[2], float scale) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, within = lane % 8;
    float scores[kPageTokens / 8][4] = {};
    const Bf16* keys = stage + (matrix / 2 * 8 + within) * S::kPitch + matrix % 2 * 8;
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
    const Bf16* values = stage + S::kPage + (matrix % 2 * 8 + within) * S::kPitch + matrix / 2 * 8;
#pragma unroll
    for (int k = 0; k < kPageTokens / 16; ++k) {
        const auto &low = scores[2 * k], &high = scores[2 * k + 1];
        const std::uint32_t weights[4] = {join_narrowed(low[0], low[1]), join_narrowed(low[2], low[3]),
                                          join_narrowed(high[0], high[1]), join_narrowed(high[2], high[3])};
#pragma unroll
        for (int n = 0; n < S::kDim / 16; ++n) {
            std::uint32_t b[4];
            load_transposed(b, values + k * 16 * S::kPitch + n * 16);
            multiply_add(rows.out[2 * n], weights, b[0], b[1]);
            multiply_add(rows.out[2 * n + 1], weights, b[2], b[3]);
        }
    }
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
__global__ void __launch_bounds__(S::kThreads)
    attention_tile_kernel(const __grid_constant__ PagedAttention p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Bf16* stages = reinterpret_cast<Bf16*>(memory);
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
    std::uint32_t q[S::kDim / 16][4];
#pragma unroll
    for (int k = 0; k < S::kDim / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Row& row = mine[i % 2];
            const int column = k * 16 + i / 2 * 8 + lane % 4 * 2;
            const Bf16* from =
                static_cast<const Bf16*>(p.q) + row.query * p.q_stride + row.head * head_dim + column;
            q[k][i] = row.there && column < head_dim ? *reinterpret_cast<const std::uint32_t*>(from) : 0u;
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
    if (!kParts) totals.clear(reinterpret_cast<float*>(memory + S::kStagesBytes));
    if (first_page < pages) copy(first_page);
    for (int page = first_page; page < pages; ++page) {
        wait_for_copies<0>();
        __syncthreads();  // this page has arrived for all threads, and none uses the previous one any more
        if (page + 1 < pages) copy(page + 1);
        const std::int64_t first = std::int64_t(page) * kPageTokens;
        if (first < warp_end) {
            add_page<S>(part, q, stages + page % 2 * (2 * S::kPage), first, last_key, p.scale);
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
void launch(const PagedAttention& p, std::int64_t blocks, cudaStream_t stream) {
    const auto kernel = attention_tile_kernel<S>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes),
          "the shared memory of attention_tiles");
    kernel<<<dim3(unsigned(blocks * p.kv_heads), unsigned(p.num_sequences)), S::kThreads, S::kBytes,
             stream>>>(p);
    check_launch("attention_tiles");
}

template <int kDim>
void launch_dim(PagedAttention p, cudaStream_t stream) {
    using Many = Shape<kDim, kManyWarps<kDim>>;
    p.scale *= kAttentionLog2e;
    if (p.parts) return launch<Shape<kDim, 1>>(p, num_splits(p.max_context), stream);
    launch<Many>(p, (p.max_new * (p.heads / p.kv_heads) + Many::kRows - 1) / Many::kRows, stream);
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
