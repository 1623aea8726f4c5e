// A model's whole pass as one call by one thread pool: embedding, layers, final norm, output projection, and
// the likeliest token of each row of logits.
//
// The bits are those of its parts called one by one.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// is_beside: it reads what the sub-block before it reads, under the same norm, and its result is added to
// that one's.
struct LayerEntry {
    std::shared_ptr<const SubBlock> sub_block;
    bool is_beside = false;
};

using Layer = std::vector<LayerEntry>;

struct StackParams {
    std::vector<Layer> layers;
    PreNorm norm;                     // the final one
    Projection head;                  // (vocabulary, h)
    const void* embedding = nullptr;  // (vocabulary, h) contiguous of the head's type; null: the head's rows
};

// Rows of the residual, and what is wanted of them.
struct WantedRows {
    std::int64_t count = 0;
    const std::int64_t* rows = nullptr;  // (count)
};

struct PassParams {
    const std::int64_t* tokens = nullptr;  // (t)
    RaggedParams ragged;
    PagedSequences sequences;  // null addresses for a model without attention
    std::int64_t num_pages = 0;
    WantedRows for_logits;
    float* logits = nullptr;            // (for_logits.count, vocabulary) contiguous
    std::int64_t* likeliest = nullptr;  // (for_logits.count); as LogprobParams has them
    float* logprobs = nullptr;          // (for_logits.count) or null
    WantedRows for_hidden;
    void* hidden = nullptr;  // (for_hidden.count, h) contiguous of the head's type: normed
};

// Whether every number of a pass names a token, a row or a page that is there: those of a pass may change
// while their addresses stay. What the ragged names was looked at when it was made.
bool fits(const StackParams& params, const PassParams& pass);

// on_layer: called by this thread before each layer; may throw.
void run_stack(const StackParams& params, const PassParams& pass, const std::function<void()>& on_layer,
               int num_threads);

}  // namespace apcbatch
