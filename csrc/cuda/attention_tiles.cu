// Causal attention over a paged KV cache on tensor cores: see paged_attention.cu for the definition.
//
// A warp computes 16 (query, head) rows that share a kv head; a block has one warp or several. On Hopper four
// warps multiply together as a warpgroup, with the same bits. Pages of 64 keys are processed in ascending
// order. Shared memory has two stages: the next page is copied while this one is multiplied.
//
// Pages are as attention_page.cuh says. The chain over the keys restarts every kSplitTokens keys, and the
// parts are joined as in attention_part.cuh. So a query's bits depend on its absolute position and on the
// keys up to it, not on its tile.
#include "attention_page.cuh"
#include "attention_part.cuh"
#include "attention_tiles.h"

namespace apcbatch {
namespace cuda {
namespace {

// Warps of a block for chunks of many rows: as many as fit in shared memory.
template <int kDim>
constexpr int kManyWarps = kDim <= 128 ? 8 : 4;
constexpr int kPagesOfSplit = int(kSplitTokens / kPageTokens);

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

    __device__ __forceinline__ void join(const LaneRows<kTiles>& later) {
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
    LaneRows<S::kTiles> part;
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
