// Feed-forward sub-blocks, norm included, one call each: an MLP, and a mixture of experts, each of them an
// MLP.
//
// An MLP is SwiGLU (Shazeer 2020, "GLU variants improve transformer"), or a squared ReLU without a gate (So
// et al. 2021, "Primer"). A token's mixture is summed over its experts in ascending order. Each weighted
// output is rounded before it is added. The sum is independent of other tokens' routing.
#pragma once

#include <vector>

#include "linear.h"
#include "rowwise.h"
#include "sub_block.h"

namespace apcbatch {

struct ExpertParams {
    DType dtype = DType::float32;  // of the activations
    Projection gate_up, down;      // (2f, h): gate rows, then up rows, or (f, h): up rows alone; (h, f)
    bool is_gated = true;          // down(silu(gate x) * up x); false: down(relu(up x)^2)
};

// gate: (1, h); each token's output is multiplied by the sigmoid of its logit, as in the shared expert of a
// mixture. out is 0 without one.
struct Mlp final : SubBlock {
    PreNorm norm;
    ExpertParams expert;
    Projection gate;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

// Mixture of experts. With latent projections the experts work on l columns: y = latent_out(mixture(latent_in
// x)).
struct Mixture final : SubBlock {
    PreNorm norm;
    Projection router;                 // (experts, h)
    RoutingParams rule;                // all but t and the addresses of logits, weights and indices
    Projection latent_in, latent_out;  // (l, h), (h, l); null weights: none
    std::vector<ExpertParams> experts;

    bool is_latent() const { return latent_in.weights != nullptr; }

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
};

}  // namespace apcbatch
