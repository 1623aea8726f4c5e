// The launches of consecutive sub-blocks of a model, listed once and then made by one call for each pass, to
// save host time. The bits equal those of the ops.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "codes.h"
#include "heads.h"
#include "library.h"
#include "rows.h"

namespace apcbatch {
namespace cuda {

// A matrix (t, columns) in the workspace of a pass: the columns of a buffer from `column` on, whose rows are
// `stride` elements apart.
struct Rows {
    int buffer;
    std::int64_t column, stride;
    DType dtype;
};

constexpr int kLeft = -1;  // buffer of the residual's next delta, (t, h) float32

// Weights (out, in) of a fixed-order product. coded: null, or the weights as codes, instead of the address.
struct ChainWeights {
    const void* weight;
    int out, in, pieces;
    std::shared_ptr<const CodedWeights> coded;
};

// Kernel of a product: a cuBLASLt kernel and its in_turn (see library.h), or our own kernel.
struct ChainKernel {
    bool of_library, in_turn;
    LibraryChoice choice;
};

// A pass. sum: (t, h) float32, the residual stream, to which delta is added. delta: (t, h) float32 or null.
// pending: what finishes it, see Pending.
// left: (t, h) float32, the output of the last sub-block. workspace: workspace_bytes bytes, aligned to 256.
// kernels: of each product shape. page_table: (b, pages), and the rest, for attention: see AttentionParams
// and KvParams.
struct ProgramPass {
    Batch batch;
    float* sum;
    const float* delta;
    Pending pending;
    float* left;
    void* workspace;
    std::vector<ChainKernel> kernels;
    const std::int64_t *page_table, *context, *token_slots, *positions;
    std::int64_t pages;
};

class Program {
  public:
    // Returns the number of a new buffer with `bytes` for each token.
    int buffer(std::int64_t bytes);
    // Begins a sub-block, which may use the buffers of those before again.
    void begin() { used_ = 0; }
    // Removes all launches after the first `count`.
    void truncate(std::size_t count) { ops_.resize(count); }
    std::size_t size() const { return ops_.size(); }

    // Add a launch. Parameters lack the pass's sizes, lists, inputs and outputs.
    void norm(const SumNormParams& params, const Rows& y);  // of the residual
    // factors: (h) or null, of the columns of what this sub-block leaves.
    void leave(const float* factors);
    void norms(const std::vector<SumNormParams>& params, const std::vector<Rows>& x,
               const std::vector<Rows>& y);
    void product(const ChainWeights& weights, int kernel, const Rows& x, const Rows& y);
    void scale(const float* factors, std::int64_t columns, const Rows& x, const Rows& y);
    void conv(const ConvParams& params, const Rows& x, const Rows& y);
    void scan(const ScanParams& params, const Rows& x, const Rows& dt, const Rows& B, const Rows& C,
              const Rows& z, const Rows& y);
    void scan_heads(const HeadScanParams& params, const Rows& x, const Rows& gates, const Rows& memory,
                    const Rows& y);
    void gate(const GatedNormParams& params, const Rows& x, const Rows& gate, const Rows& y);
    void multiply(std::int64_t columns, const Rows& gate, const Rows& up, bool has_silu, const Rows& y);
    void rope(const NormRopeParams& params, const Rows& x, const Rows& y);
    void attend(const AttentionParams& params, const Rows& q, const Rows& k, const Rows& v, const Rows& y);
    void sigmoid(std::int64_t columns, const Rows& x, const Rows& gate, const Rows& y);

    std::size_t workspace_bytes(std::int64_t tokens, const std::vector<ChainKernel>& kernels) const;
    void run(const ProgramPass& pass, cudaStream_t stream) const;

  private:
    struct Run;
    std::vector<std::function<void(Run&)>> ops_;
    std::vector<std::int64_t> bytes_;                     // of each buffer, for each token
    std::vector<std::pair<ChainWeights, int>> products_;  // with the numbers of their kernels
    std::size_t used_ = 0;                                // buffers of the present sub-block
};

}  // namespace cuda
}  // namespace apcbatch
