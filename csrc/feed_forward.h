// Feed-forward sub-blocks, norm included, one call each: a SwiGLU MLP, and a mixture of SwiGLU experts.
//
// Shazeer 2020, "GLU variants improve transformer". A token's mixture is summed over its experts in ascending
// order. Each weighted output is rounded before it is added. The sum is independent of other tokens' routing.
#pragma once

#include <vector>

#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

struct ExpertParams {
    DType dtype = DType::float32;  // of the activations
    Projection gate_up, down;      // (2f, h): gate rows, then up rows; (h, f)
};

struct Mlp final : SubBlock {
    PreNorm norm;
    ExpertParams expert;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

// Mixture: each token uses its experts_per_token likeliest experts, weighted by the softmax over all experts.
// is_normalised: these weights are divided by their sum, which is the softmax over the chosen experts.
struct Mixture final : SubBlock {
    PreNorm norm;
    Projection router;  // (experts, h)
    std::int64_t experts_per_token = 0;
    bool is_normalised = false;
    std::vector<ExpertParams> experts;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

}  // namespace apcbatch
