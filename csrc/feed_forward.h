// The feed-forward parts: a SwiGLU MLP, and a mixture of them, each, its norm included, as one call.
//
// Shazeer 2020, "GLU variants improve transformer"; a token's mixture is the sum over its experts in
// ascending order, each part rounded before it is added, whatever else is routed where. Must not know:
// layers, Python.
#pragma once

#include <vector>

#include "linear.h"
#include "params.h"
#include "residual.h"

namespace apcbatch {

struct MlpParams {
    DType dtype = DType::float32;  // of the activations
    Projection gate_up, down;      // (2f, h): gate rows, then up rows; (h, f)
};

struct MixtureParams {
    Projection router;  // (experts, h)
    std::int64_t experts_per_token = 0;
    std::vector<MlpParams> experts;
};

// The residual's delta becomes the result.
void mlp(const MlpParams& params, const PreNorm& norm, std::int64_t t, const Residual& residual,
         int num_threads);
// Each token's experts_per_token likeliest experts, weighted by the softmax over all of them.
void mixture(const MixtureParams& params, const PreNorm& norm, std::int64_t t, const Residual& residual,
             int num_threads);

}  // namespace apcbatch
