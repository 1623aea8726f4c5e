// A sub-block of a layer, its norm included: the interface by which a stack runs it.
//
// A new kind is a struct that derives from SubBlock, in files of its own, and its class in
// bindings_layers.cpp. The slots and pages that a kind needs are checked when it is bound and when a pass is
// taken (apcbatch/kernels/cpu/sub_block.py). A speculative pass would extend this interface: which inputs a
// kind keeps for tokens that may be rejected, and how it replays the accepted ones from the state before.
#pragma once

#include "params.h"
#include "residual.h"

namespace apcbatch {

// Where the sequences of a pass have their keys and values.
struct PagedSequences {
    std::int64_t num_sequences = 0;
    const std::int64_t* page_table = nullptr;  // (b, max_pages), row stride page_table_stride
    std::int64_t page_table_stride = 0;
    const std::int64_t* cu_seqlens = nullptr;   // (b + 1)
    const std::int64_t* context = nullptr;      // (b): tokens cached before this piece
    const std::int64_t* token_slots = nullptr;  // (t): page * kPageTokens + offset
};

// The t tokens of a pass, and where their sequences have what each kind keeps.
struct SubBlockInputs {
    std::int64_t t = 0;
    RaggedParams ragged;       // null addresses where no sub-block has slots
    PagedSequences sequences;  // null addresses where no sub-block has pages
};

// Filled once for each layer, then read by all passes.
struct SubBlock {
    virtual ~SubBlock() = default;
    // Bytes of working memory that `run` takes for t tokens.
    virtual std::int64_t scratch_bytes(std::int64_t t) const = 0;
    // The residual's delta becomes the result. memory: scratch_bytes(inputs.t), aligned to 64.
    virtual void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                     int num_threads) const = 0;
};

}  // namespace apcbatch
