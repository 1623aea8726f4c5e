// Interface of a layer's sub-block, its norm included, for a stack.
//
// To add a kind, derive a struct from SubBlock in files of its own, and bind its class in
// bindings_layers.cpp. Slots and pages are checked when a sub-block is bound and when a pass is checked
// (apcbatch/kernels/cpu/sub_block.py). Speculative decoding would extend this interface by two functions:
// keep the inputs of tokens that may be rejected, and replay the accepted tokens from the state before them.
#pragma once

#include "params.h"
#include "residual.h"

namespace apcbatch {

// Locations of a pass's keys and values in the paged KV cache.
struct PagedSequences {
    std::int64_t num_sequences = 0;
    const std::int64_t* page_table = nullptr;  // (b, max_pages), row stride page_table_stride
    std::int64_t page_table_stride = 0;
    const std::int64_t* cu_seqlens = nullptr;   // (b + 1)
    const std::int64_t* context = nullptr;      // (b): tokens cached before this chunk
    const std::int64_t* token_slots = nullptr;  // (t): page * kPageTokens + offset
};

// Inputs of a pass of t tokens: state slots and KV pages of its sequences.
struct SubBlockInputs {
    std::int64_t t = 0;
    RaggedParams ragged;       // null addresses if no sub-block has slots
    PagedSequences sequences;  // null addresses if no sub-block has pages
};

// Sub-block bound to its weights and state. Filled once per layer, then read by all passes.
struct SubBlock {
    virtual ~SubBlock() = default;
    // Returns the bytes of working memory that `run` needs for t tokens.
    virtual std::int64_t scratch_bytes(std::int64_t t) const = 0;
    // Runs the sub-block and writes its output to the residual's delta. memory: scratch_bytes(inputs.t)
    // bytes, aligned to 64.
    virtual void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                     int num_threads) const = 0;
};

}  // namespace apcbatch
