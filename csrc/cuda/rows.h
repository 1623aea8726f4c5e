// The CUDA kernels around the recurrent ones: norms, choices from logits, attention over a paged KV cache.
// The structs are those of the CPU, every address on the device, and a stream. The functions return at once
// and throw std::runtime_error if a launch was refused.
#pragma once

#include "../attention.h"
#include "../rowwise.h"
#include "launch.h"

namespace apcbatch {
namespace cuda {

constexpr std::int64_t kMostChoices = 1024;  // columns of softmax_topk
constexpr std::int64_t kMostHeadDim = 256;

void rms_norm(const NormParams& params, cudaStream_t stream);

// Several, each by itself: in one launch where there are kMostNorms at most, of narrow rows and the same
// types.
constexpr int kMostNorms = 3;
void rms_norms(const NormParams* params, int count, cudaStream_t stream);
void silu_mul(const SiluMulParams& params, cudaStream_t stream);
void softmax_topk(const TopkParams& params, cudaStream_t stream);
void logprob(const LogprobParams& params, cudaStream_t stream);

// Attention's sums are split at multiples of this absolute position and the parts joined in ascending order,
// wherever they were computed.
constexpr std::int64_t kSplitTokens = 512;

__host__ __device__ constexpr std::int64_t num_splits(std::int64_t tokens) {
    return (tokens + kSplitTokens - 1) / kSplitTokens;
}

constexpr std::int64_t kMostSplitHeads = 16;  // that share a kv head, where splits are computed side by side

// q, k_cache, v_cache and out have one dtype. parts: null, or where each sequence has one new token, and
// kMostSplitHeads heads a kv head at most, room for (num_sequences, heads, num_splits(max_context), head_dim
// + 2) floats: then the splits are computed side by side. Either way gives the same bits.
struct PagedAttention : AttentionParams {
    std::int64_t max_new;      // the most new tokens of a sequence, or more
    std::int64_t max_context;  // the most tokens of a sequence, the new ones included, or more
    float* parts;
};

void paged_attention(const PagedAttention& params, cudaStream_t stream);

// k, v and the caches have one dtype.
void write_kv(const KvParams& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
