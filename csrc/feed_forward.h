// The feed-forward parts: a SwiGLU MLP and a mixture of them, each, its norm included, as one call.
//
// Shazeer 2020, "GLU variants improve transformer"; a token's mixture is the sum over its experts in
// ascending order, each part rounded before it is added, independent of the routing of other tokens.
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

// Each token's experts_per_token likeliest experts, weighted by the softmax over all of them.
struct Mixture final : SubBlock {
    PreNorm norm;
    Projection router;  // (experts, h)
    std::int64_t experts_per_token = 0;
    std::vector<ExpertParams> experts;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

}  // namespace apcbatch
