// Causal attention of the new tokens of each sequence over a paged KV cache (Vaswani et al., arXiv
// 1706.03762, equation 1, with the grouped heads of Ainslie et al., arXiv 2305.13245).
//
// A block computes a tile of (query, head) rows that share a kv head, over the pages in ascending order. A
// page's scores, maximum and sum are each a fixed sequence of operations. Splits of kSplitTokens keys are
// joined by one function. So a query's bits depend on its absolute position and on the keys up to it, never
// on its chunk or batch, nor on where its splits are computed.
#include <stdexcept>
#include <string>

#include "attention_part.cuh"
#include "attention_tiles.h"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kRows = 32;      // (query, head) rows of a block
constexpr int kThreads = 256;  // 16 groups of 2 rows x 16 lanes
constexpr int kLanes = 16;
constexpr int kRowsEach = 2;
constexpr int kKeysEach = kPageTokens / kLanes;

__device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, lane));
    return v;
}

__device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
    for (int lane = kLanes / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
    return v;
}

// Shared memory of a block: the tile's queries, one page of keys or values, the page's weights.
struct Shared {
    float* q;        // (kRows, head_dim + 1)
    float* kv;       // (kPageTokens, head_dim + 1): first keys, then values
    float* weights;  // (kRows, kPageTokens + 1)
};

__device__ __forceinline__ Shared carve(float* memory, int head_dim) {
    return {memory, memory + kRows * (head_dim + 1), memory + (kRows + kPageTokens) * (head_dim + 1)};
}

template <class T>
__device__ __forceinline__ void load_page(const T* cache, std::int64_t page, std::int64_t kv_head,
                                          const PagedAttention& p, float* kv, int keys) {
    const int head_dim = int(p.head_dim);
    const T* rows = cache + (page * kPageTokens * p.kv_heads + kv_head) * head_dim;
    for (int at = threadIdx.x; at < keys * head_dim; at += kThreads) {
        const int key = at / head_dim, column = at % head_dim;
        kv[key * (head_dim + 1) + column] = widen(rows[key * p.kv_heads * head_dim + column]);
    }
}

// Adds the page whose keys begin at position `first` to this thread's rows. Row r sees keys up to
// last_key[r].
template <int kColumns, class T>
__device__ __forceinline__ void add_page(const PagedAttention& p, std::int64_t page, std::int64_t kv_head,
                                         std::int64_t first, const std::int64_t (&last_key)[kRowsEach],
                                         int keys, const Shared& shared, Part<kColumns> (&parts)[kRowsEach]) {
    const int head_dim = int(p.head_dim), pitch = head_dim + 1;
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    __syncthreads();
    load_page(static_cast<const T*>(p.k_cache), page, kv_head, p, shared.kv, keys);
    __syncthreads();
    float scores[kRowsEach][kKeysEach] = {};
    const float* q = shared.q + group * kRowsEach * pitch;
    for (int d = 0; d < head_dim; ++d) {
        float key[kKeysEach];
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) key[j] = shared.kv[(lane + j * kLanes) * pitch + d];
#pragma unroll
        for (int r = 0; r < kRowsEach; ++r) {
            const float value = q[r * pitch + d];
#pragma unroll
            for (int j = 0; j < kKeysEach; ++j) scores[r][j] = fmaf(value, key[j], scores[r][j]);
        }
    }
    float kept[kRowsEach];
#pragma unroll
    for (int r = 0; r < kRowsEach; ++r) {
        float highest = -INFINITY;
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) {
            if (first + lane + j * kLanes > last_key[r]) scores[r][j] = -INFINITY;
            highest = fmaxf(highest, scores[r][j]);
        }
        highest = fmaxf(parts[r].highest, lanes_max(highest));
        const float base = highest == -INFINITY ? 0.0f : highest;
        kept[r] = exp2f(parts[r].highest - base);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeysEach; ++j) {
            const float weight = exp2f(scores[r][j] - base);
            shared.weights[(group * kRowsEach + r) * (kPageTokens + 1) + lane + j * kLanes] = weight;
            sum += weight;
        }
        parts[r].sum = fmaf(parts[r].sum, kept[r], lanes_sum(sum));
        parts[r].highest = highest;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) parts[r].out[c] = __fmul_rn(parts[r].out[c], kept[r]);
    }
    __syncthreads();
    load_page(static_cast<const T*>(p.v_cache), page, kv_head, p, shared.kv, keys);
    __syncthreads();
    for (int key = 0; key < keys; ++key) {
        float weight[kRowsEach];
#pragma unroll
        for (int r = 0; r < kRowsEach; ++r)
            weight[r] = shared.weights[(group * kRowsEach + r) * (kPageTokens + 1) + key];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            if (lane + c * kLanes >= head_dim) break;
            const float value = shared.kv[key * pitch + lane + c * kLanes];
#pragma unroll
            for (int r = 0; r < kRowsEach; ++r) parts[r].out[c] = fmaf(weight[r], value, parts[r].out[c]);
        }
    }
}

template <int kColumns, class T>
__global__ void __launch_bounds__(kThreads) paged_attention_kernel(PagedAttention p) {
    extern __shared__ float memory[];
    const int head_dim = int(p.head_dim);
    const Shared shared = carve(memory, head_dim);
    const int heads_each = int(p.heads / p.kv_heads);
    const std::int64_t sequence = blockIdx.z, kv_head = blockIdx.y;
    const std::int64_t begin = p.cu_seqlens[sequence],
                       rows = (p.cu_seqlens[sequence + 1] - begin) * heads_each;
    const std::int64_t tile = p.parts ? 0 : blockIdx.x;
    if (tile * kRows >= rows) return;
    // Row i of the sequence is head i % heads_each of query i / heads_each.
    for (int at = threadIdx.x; at < kRows * head_dim; at += kThreads) {
        const std::int64_t row = tile * kRows + at / head_dim;
        const std::int64_t head = kv_head * heads_each + row % heads_each;
        const T* q = static_cast<const T*>(p.q) + (begin + row / heads_each) * p.q_stride + head * head_dim;
        const float value = row < rows ? widen(q[at % head_dim]) : 0.0f;
        shared.q[at / head_dim * (head_dim + 1) + at % head_dim] = value * p.scale;
    }
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    std::int64_t last_key[kRowsEach];
    Part<kColumns> total[kRowsEach], part[kRowsEach];
    for (int r = 0; r < kRowsEach; ++r) {
        const std::int64_t row = tile * kRows + group * kRowsEach + r;
        last_key[r] = row < rows ? p.context[sequence] + row / heads_each : -1;
        total[r].clear();
    }
    const std::int64_t last_row = min(rows, (tile + 1) * kRows) - 1;
    const std::int64_t end = p.context[sequence] + last_row / heads_each + 1;
    const std::int64_t first_split = p.parts ? blockIdx.x : 0;
    const std::int64_t splits = num_splits(end);
    const std::int64_t last_split = p.parts ? min(first_split + 1, splits) : splits;
    const std::int64_t* pages = p.page_table + sequence * p.page_table_stride;
    for (std::int64_t split = first_split; split < last_split; ++split) {
        for (int r = 0; r < kRowsEach; ++r) part[r].clear();
        const std::int64_t split_end = min(end, (split + 1) * kSplitTokens);
        for (std::int64_t first = split * kSplitTokens; first < split_end; first += kPageTokens) {
            const int keys = int(min(std::int64_t(kPageTokens), end - first));
            add_page<kColumns, T>(p, pages[first / kPageTokens], kv_head, first, last_key, keys, shared,
                                  part);
        }
        if (!p.parts) {
            for (int r = 0; r < kRowsEach; ++r) total[r].join(part[r]);
        }
    }
    for (int r = 0; r < kRowsEach; ++r) {
        const std::int64_t row = tile * kRows + group * kRowsEach + r;
        if (row >= rows) continue;
        const std::int64_t head = kv_head * heads_each + row % heads_each;
        if (p.parts) {
            if (first_split >= splits) continue;
            const std::int64_t max_splits = num_splits(p.max_context);
            float* to = p.parts + ((sequence * p.heads + head) * max_splits + first_split) * (head_dim + 2);
            for (int c = 0; c < kColumns && lane + c * kLanes < head_dim; ++c)
                to[lane + c * kLanes] = part[r].out[c];
            if (lane == 0) {
                to[head_dim] = part[r].highest;
                to[head_dim + 1] = part[r].sum;
            }
            continue;
        }
        T* to = static_cast<T*>(p.out) + ((begin + row / heads_each) * p.heads + head) * head_dim;
        for (int c = 0; c < kColumns && lane + c * kLanes < head_dim; ++c)
            to[lane + c * kLanes] = narrow<T>(total[r].out[c] / total[r].sum);
    }
}

// Joins the splits of one query in ascending order, one thread per column.
template <class T>
__global__ void join_kernel(PagedAttention p) {
    const std::int64_t sequence = blockIdx.y, head = blockIdx.x, head_dim = p.head_dim;
    const std::int64_t max_splits = num_splits(p.max_context);
    const std::int64_t begin = p.cu_seqlens[sequence];
    if (p.cu_seqlens[sequence + 1] == begin) return;
    const std::int64_t splits = num_splits(p.context[sequence] + 1);
    const float* from = p.parts + (sequence * p.heads + head) * max_splits * (head_dim + 2);
    for (std::int64_t column = threadIdx.x; column < head_dim; column += blockDim.x) {
        Part<1> total;
        total.clear();
        for (std::int64_t split = 0; split < splits; ++split) {
            const float* at = from + split * (head_dim + 2);
            Part<1> part{at[head_dim], at[head_dim + 1], {at[column]}};
            total.join(part);
        }
        static_cast<T*>(p.out)[(begin * p.heads + head) * head_dim + column] =
            narrow<T>(splits ? total.out[0] / total.sum : 0.0f);
    }
}

template <int kColumns, class T>
void launch(PagedAttention p, cudaStream_t stream) {
    p.scale *= kAttentionLog2e;
    const std::size_t bytes =
        sizeof(float) * ((kRows + kPageTokens) * (p.head_dim + 1) + kRows * (kPageTokens + 1));
    const auto kernel = paged_attention_kernel<kColumns, T>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
          "the shared memory of paged_attention");
    const std::int64_t tiles = (p.max_new * (p.heads / p.kv_heads) + kRows - 1) / kRows;
    const std::int64_t splits = num_splits(p.max_context);
    const dim3 grid(unsigned(p.parts ? splits : tiles), unsigned(p.kv_heads), unsigned(p.num_sequences));
    kernel<<<grid, kThreads, bytes, stream>>>(p);
    check_launch("paged_attention");
}

template <class T>
void join_parts(const PagedAttention& p, cudaStream_t stream) {
    join_kernel<T><<<dim3(unsigned(p.heads), unsigned(p.num_sequences)), 128, 0, stream>>>(p);
    check_launch("the joining of paged_attention");
}

template <class T>
__global__ void write_kv_kernel(KvParams p) {
    const std::int64_t token = blockIdx.x, slot = p.token_slots[token];
    if (slot < 0) return;
    const T* k = static_cast<const T*>(p.k) + token * p.k_stride;
    const T* v = static_cast<const T*>(p.v) + token * p.v_stride;
    for (std::int64_t i = threadIdx.x; i < p.row; i += blockDim.x) {
        static_cast<T*>(p.k_cache)[slot * p.row + i] = k[i];
        static_cast<T*>(p.v_cache)[slot * p.row + i] = v[i];
    }
}

}  // namespace

void write_kv(const KvParams& p, cudaStream_t stream) {
    if (p.t == 0) return;
    with_element(p.dtype, [&](auto element) {
        write_kv_kernel<decltype(element)><<<unsigned(p.t), 128, 0, stream>>>(p);
    });
    check_launch("write_kv");
}

void paged_attention(const PagedAttention& p, cudaStream_t stream) {
    if (p.num_sequences == 0 || p.max_new == 0) return;
    constexpr std::int64_t kMostBlocks = 65535;  // CUDA's limit of the grid's second and third dimension
    if (p.num_sequences > kMostBlocks || p.kv_heads > kMostBlocks) {
        throw std::invalid_argument("paged_attention takes up to 65,535 sequences and kv heads; there are " +
                                    std::to_string(p.num_sequences) + " and " + std::to_string(p.kv_heads));
    }
    with_element(p.q_dtype, [&](auto element) {
        using T = decltype(element);
        if (takes_tiles(p)) {
            attention_tiles(p, stream);
        } else if (p.head_dim <= 64) {
            launch<4, T>(p, stream);
        } else if (p.head_dim <= 128) {
            launch<8, T>(p, stream);
        } else {
            launch<16, T>(p, stream);
        }
        if (p.parts) join_parts<T>(p, stream);
    });
}

}  // namespace cuda
}  // namespace apcbatch
