// Interface of a layer's sub-block, its norm included, for a stack.
//
// To add a kind, derive a struct from SubBlock in files of its own, and bind its class in
// bindings_layers.cpp. The Python side checks slots and pages, when it binds a sub-block and when it checks
// a pass (apcbatch/kernels/cpu). A pass leaves the states of a sequence with drafts unchanged: a kind with
// slots keeps the inputs of its recurrence instead, and replays the accepted tokens.
#pragma once

#include <initializer_list>

#include "attention.h"
#include "linear.h"

namespace apcbatch {

// RMS norm at the beginning of a sub-block.
struct PreNorm {
    const float* weight = nullptr;  // (h)
    float eps = 0.0f;
};

// Residual stream between sub-blocks: a running sum, and the pending output of the last sub-block. Both (t,
// h) contiguous. has_delta: delta must be added to sum first. Either way, the sub-block overwrites delta with
// its result.
struct Residual {
    float* sum = nullptr;
    float* delta = nullptr;
    bool has_delta = false;
};

// Adds delta to sum if has_delta, then writes the sum's norm to `normed`, which is contiguous.
void pre_norm(const PreNorm& norm, const Residual& residual, const Rows& normed, int num_threads);

// Tokens of a pass whose inputs are kept.
struct KeptRows {
    std::int64_t count = 0;
    const std::int64_t* rows = nullptr;  // (count)
};

// Inputs of a pass of t tokens: state slots and KV pages of its sequences.
struct SubBlockInputs {
    std::int64_t t = 0;
    RaggedParams ragged;       // null addresses if a sub-block without slots runs alone
    PagedSequences sequences;  // null page_table, context and token_slots if no sub-block has pages
    KeptRows kept;
    char* kept_inputs = nullptr;  // written by this sub-block: kept.count rows of kept_bytes() each
};

// Kept rows [first, first + count) by which to advance the state in `slot`.
struct Replay {
    std::int64_t slot = 0;
    std::int64_t first = 0, count = 0;
};

// Returns a number of bytes rounded up to whole cache lines of 64.
constexpr std::int64_t whole_lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Cuts consecutive parts from a workspace, each of whole cache lines. With null memory it only adds up their
// sizes.
class Workspace {
  public:
    explicit Workspace(char* memory) : memory_(memory) {}
    template <class T>
    T* take(std::int64_t count) {
        T* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
        bytes_ += whole_lines(count * std::int64_t(sizeof(T)));
        return part;
    }
    Rows rows(std::int64_t t, std::int64_t columns, DType dtype) {
        return {t, take<char>(t * columns * bytes_of(dtype)), columns, dtype};
    }
    std::int64_t bytes() const { return bytes_; }

  private:
    char* memory_;
    std::int64_t bytes_ = 0;
};

// The first `columns` columns of some rows.
struct KeptColumns {
    Rows rows;
    std::int64_t columns;
};

// Copies these columns of the rows inputs.kept, side by side, to inputs.kept_inputs, row_bytes apart.
void keep_rows(const SubBlockInputs& inputs, std::int64_t row_bytes, std::initializer_list<KeptColumns> parts,
               int num_threads);

// Sub-block bound to its weights and state. Filled once per layer, then read by all passes.
struct SubBlock {
    virtual ~SubBlock() = default;
    // Returns the bytes of working memory that `run` needs for t tokens.
    virtual std::int64_t scratch_bytes(std::int64_t t) const = 0;
    // Runs the sub-block and writes its output to the residual's delta. memory: scratch_bytes(inputs.t)
    // bytes, aligned to 64.
    virtual void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                     int num_threads) const = 0;
    // Returns the bytes that `run` keeps per row of inputs.kept, a multiple of 64; 0 for a kind without
    // slots.
    virtual std::int64_t kept_bytes() const { return 0; }
    // Returns the bytes of working memory of `replay`, whose replays have at most `count` rows each.
    virtual std::int64_t replay_bytes(std::int64_t) const { return 0; }
    // Advances states by kept rows, on this thread alone, with the bits of a pass over these tokens.
    // replays: in ascending order of their rows. kept: all kept rows of this sub-block. memory:
    // replay_bytes(count) bytes, aligned to 64.
    virtual void replay(const Replay* /*replays*/, std::int64_t /*num_replays*/, const char* /*kept*/,
                        char* /*memory*/) const {}
};

}  // namespace apcbatch
