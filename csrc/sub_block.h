// Interface of a layer's sub-block, its norm included, for a stack.
//
// To add a kind, derive a struct from SubBlock in files of its own, and bind its class in
// bindings_layers.cpp. Slots and pages are checked when a sub-block is bound and when a pass is checked
// (apcbatch/kernels/cpu/sub_block.py). A kind with slots also keeps the inputs of its recurrence for drafted
// tokens, whose states a pass does not write, and replays the accepted ones from the state before them.
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

// Tokens of a pass whose inputs are kept.
struct KeptRows {
    std::int64_t count = 0;
    const std::int64_t* rows = nullptr;  // (count)
};

// Inputs of a pass of t tokens: state slots and KV pages of its sequences.
struct SubBlockInputs {
    std::int64_t t = 0;
    RaggedParams ragged;       // null addresses if no sub-block has slots
    PagedSequences sequences;  // null addresses if no sub-block has pages
    KeptRows kept;
    char* kept_inputs = nullptr;  // this sub-block's: kept.count rows of kept_bytes() each
};

// Kept rows to continue the state in `slot` with.
struct Replay {
    std::int64_t slot = 0;
    std::int64_t first = 0, count = 0;
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
    // Returns the bytes that `run` keeps of each of inputs.kept, a multiple of 64. 0: a kind without slots.
    virtual std::int64_t kept_bytes() const { return 0; }
    // Returns the bytes of working memory of a `replay` of at most `count` rows each.
    virtual std::int64_t replay_bytes(std::int64_t) const { return 0; }
    // Continues states by kept rows, on this thread alone: the bits of a pass over these tokens. replays: in
    // the order of their rows. kept: all kept rows. memory: replay_bytes, aligned to 64.
    virtual void replay(const Replay* /*replays*/, std::int64_t /*num_replays*/, const char* /*kept*/,
                        char* /*memory*/) const {}
};

}  // namespace apcbatch
