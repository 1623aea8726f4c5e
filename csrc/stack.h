// Run a model's whole pass by one call, on one thread pool: embedding, layers, final norm, output projection,
// argmax of each row of logits.
//
// The bits equal those of the kernels called one by one.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "sub_block.h"

namespace apcbatch {

// Sub-block of a layer. is_beside: it runs in parallel with the previous sub-block: both read the same normed
// residual, and their outputs are added.
struct Entry {
    std::shared_ptr<const SubBlock> sub_block;
    bool is_beside = false;
    bool begins_layer = false;
};

struct StackParams {
    std::vector<Entry> entries;
    PreNorm norm;                     // the final norm
    Projection head;                  // (vocabulary, h)
    const void* embedding = nullptr;  // (vocabulary, h) contiguous of the head's type; null: the head's rows
    float embedding_scale = 1.0f;
};

// Recurrence inputs of the rows PassParams::kept of the last pass that had any, for each sub-block in
// order.
class KeptInputs {
  public:
    // Allocates `rows` rows for each sub-block; the rows kept before become invalid. Throws std::bad_alloc.
    void reserve(const StackParams& params, std::int64_t rows);
    // Returns the rows of sub-block number i of the stack.
    char* of(std::size_t i) { return memory_.get() + offsets_[i] * capacity_; }
    std::int64_t rows() const { return rows_; }

  private:
    std::unique_ptr<char[]> memory_;
    std::vector<std::int64_t> offsets_;  // [i]: bytes of one row of all sub-blocks before number i
    std::int64_t capacity_ = 0, rows_ = 0;
};

// Rows of the residual to compute outputs for.
struct WantedRows {
    std::int64_t count = 0;
    const std::int64_t* rows = nullptr;  // (count)
};

struct PassParams {
    const std::int64_t* tokens = nullptr;  // (t)
    RaggedParams ragged;
    PagedSequences sequences;  // null page_table, context and token_slots for a model without attention
    std::int64_t num_pages = 0;
    WantedRows for_logits;
    float* logits = nullptr;            // (for_logits.count, vocabulary) contiguous
    std::int64_t* likeliest = nullptr;  // (for_logits.count): LogprobParams::tokens
    float* logprobs = nullptr;          // (for_logits.count) or null: LogprobParams::logprobs
    WantedRows for_hidden;
    void* hidden = nullptr;  // (for_hidden.count, h) contiguous of the head's type: normed
    KeptRows kept;
};

// Returns true if all token ids, row numbers, KV slots and pages of a pass are in range. Call it before
// each pass, as these values may change at the same addresses. `ragged` was checked when it was made.
bool fits(const StackParams& params, const PassParams& pass);

// Runs a pass. on_layer: called on this thread before each layer; may throw.
void run_stack(const StackParams& params, const PassParams& pass, KeptInputs& kept,
               const std::function<void()>& on_layer, int num_threads);

// Advances states by rows that the last pass kept. Slots must be distinct (not checked). Returns false,
// with nothing done, if a row was not kept or if the rows of the replays overlap or do not ascend.
bool replay_stack(const StackParams& params, const std::vector<Replay>& replays, KeptInputs& kept,
                  int num_threads);

}  // namespace apcbatch
