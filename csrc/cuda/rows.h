// Entry points of the row-wise CUDA kernels and of paged attention. They take the CPU's structs, with device
// addresses, and a stream. They return without waiting for the device, and throw std::runtime_error if a
// launch fails.
#pragma once

#include "../attention.h"
#include "../rowwise.h"
#include "launch.h"

namespace apcbatch {
namespace cuda {

struct Groups;
constexpr std::int64_t kMostChoices = 1024;  // maximum columns of route
constexpr std::int64_t kMostHeadDim = 256;

// What the experts of each token left: (t, per_token, h), by expert, ascending; or null. present: number of
// real tokens, which come first and without which the sum is zero; null: all.
struct ExpertRows {
    const float* rows = nullptr;
    int per_token = 0;
    const std::int64_t* present = nullptr;
};

// What finishes a delta, or is added without one: aside + delta * factors * sigmoid(gate), each operation
// rounded to float32. Instead of aside, the sum of experts.
struct Pending {
    const float* factors = nullptr;  // (h) or null
    const float* gate = nullptr;     // (t) or null
    const float* aside = nullptr;    // (t, h), row stride h; or null
    ExpertRows experts;
};

// RMS norm of x, to which what is pending is added first.
struct SumNormParams : NormParams {
    Pending pending;
};

void rms_norm(const SumNormParams& params, cudaStream_t stream);

// Computes several independent norms, without a delta. At most kMostNorms of narrow rows and equal types run
// in one launch.
constexpr int kMostNorms = 3;
void rms_norms(const SumNormParams* params, int count, cudaStream_t stream);
void silu_mul(const SiluMulParams& params, cudaStream_t stream);

// groups: null, or where to group the tokens by expert, with present: see Grouping.
void route(const RoutingParams& params, const std::int64_t* present, Groups* groups, cudaStream_t stream);
void logprob(const LogprobParams& params, cudaStream_t stream);

// Attention splits its sums at absolute positions that are multiples of kSplitTokens, and joins the splits in
// ascending order.
constexpr std::int64_t kSplitTokens = 512;

__host__ __device__ constexpr std::int64_t num_splits(std::int64_t tokens) {
    return (tokens + kSplitTokens - 1) / kSplitTokens;
}

constexpr std::int64_t kMostSplitHeads = 16;  // maximum heads per kv head if splits run in parallel

// Arguments of attention. q, k_cache, v_cache and out have one dtype. parts: null, or memory for
// (num_sequences, heads, num_splits(max_context), head_dim + 2) floats. With parts, the splits run in
// parallel; each sequence must then have one new token, and a kv head at most kMostSplitHeads heads. The bits
// are the same with and without parts.
struct PagedAttention : AttentionParams {
    std::int64_t max_new;      // upper bound of a sequence's new tokens
    std::int64_t max_context;  // upper bound of a sequence's tokens, including the new ones
    float* parts;
};

void paged_attention(const PagedAttention& params, cudaStream_t stream);

// Writes k and v to the caches, all of one dtype.
void write_kv(const KvParams& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
