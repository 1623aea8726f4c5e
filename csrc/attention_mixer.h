// The attention mixer of one layer, its norm included, as one call: what its kernels are given, in which
// order.
//
// The bits are those of the kernels called one by one. Must not know: the other layers, who owns a page,
// Python.
#pragma once

#include "attention.h"
#include "linear.h"
#include "params.h"
#include "residual.h"

namespace apcbatch {

// Filled once for each layer. h: hidden, which is heads * head_dim.
struct AttentionMixerParams {
    PreNorm norm;
    DType dtype = DType::float32;  // of the activations
    Projection qkv_proj, o_proj;   // (h + 2 * kv_heads * head_dim, h): queries, keys, values; (h, h)
    std::int64_t heads = 0, kv_heads = 0, head_dim = 0;
    float scale = 0.0f;
    void* k_cache = nullptr;  // (pages, kPageTokens, kv_heads, head_dim) contiguous
    void* v_cache = nullptr;
    DType cache_dtype = DType::float32;
};

// Where a pass's sequences have their keys and values.
struct PagedSequences {
    std::int64_t num_sequences = 0;
    const std::int64_t* page_table = nullptr;  // (b, max_pages), row stride page_table_stride
    std::int64_t page_table_stride = 0;
    const std::int64_t* cu_seqlens = nullptr;   // (b + 1)
    const std::int64_t* context = nullptr;      // (b): tokens cached before this piece
    const std::int64_t* token_slots = nullptr;  // (t): page * kPageTokens + offset
};

// The residual's delta becomes the mixer's result; the pass's keys and values are written before they are
// read.
void attention_mixer(const AttentionMixerParams& params, const PagedSequences& sequences,
                     const Residual& residual, int num_threads);

}  // namespace apcbatch
