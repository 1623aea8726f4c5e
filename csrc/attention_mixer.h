// Attention mixer of one layer, its norm included: one call that runs its kernels in order.
//
// The bits equal those of the kernels called one by one.
#pragma once

#include "attention.h"
#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// Attention mixer, filled once per layer. h: hidden, heads * head_dim. Each pass writes its keys and values
// to the cache before it reads them.
struct AttentionMixer final : SubBlock {
    PreNorm norm;
    DType dtype = DType::float32;  // of the activations
    Projection qkv_proj, o_proj;   // (h + 2 * kv_heads * head_dim, h): queries, keys, values; (h, h)
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
    float scale = 0.0f;
    void* k_cache = nullptr;  // (pages, kPageTokens, kv_heads, head_dim) contiguous
    void* v_cache = nullptr;
    DType cache_dtype = DType::float32;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

}  // namespace apcbatch
