// Attention mixer of one layer, its norm included: one call that runs its kernels in order.
//
// The bits equal those of the kernels called one by one.
#pragma once

#include "attention.h"
#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// RMS norms of queries and keys, and their rotary position embedding: see NormRopeParams.
struct QueryKeyNorms {
    const float* q = nullptr;  // (head_dim); null: no norms
    const float* k = nullptr;  // (head_dim)
    float eps = 0.0f;
    const std::int64_t* steps = nullptr;  // (pairs)
    std::int64_t pairs = 0;               // 0: no rotation

    bool is_none() const { return q == nullptr && pairs == 0; }
};

// Attention mixer, filled once per layer. h: hidden; d: heads * head_dim. Each pass writes its keys and
// values to the cache before it reads them.
struct AttentionMixer final : SubBlock {
    PreNorm norm;
    DType dtype = DType::float32;  // of the activations
    Projection qkv_proj, o_proj;   // (d + 2 * kv_heads * head_dim [+ d], h): queries, keys, values[, gates];
                                   // (h, d)
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
    float scale = 0.0f;
    QueryKeyNorms norms;
    bool is_gated = false;    // multiplies the output of attention by sigmoid(gates)
    void* k_cache = nullptr;  // (pages, kPageTokens, kv_heads, head_dim) contiguous
    void* v_cache = nullptr;
    DType cache_dtype = DType::float32;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

}  // namespace apcbatch
