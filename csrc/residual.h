// The residual stream between sub-blocks: the pending output of the sub-block before, and the RMS norm at the
// beginning of the next.
#pragma once

#include "params.h"

namespace apcbatch {

struct PreNorm {
    const float* weight = nullptr;  // (h)
    float eps = 0.0f;
};

// Both (t, h) contiguous. has_delta: delta must be added to sum first. Either way, the sub-block overwrites
// delta with its result.
struct Residual {
    float* sum = nullptr;
    float* delta = nullptr;
    bool has_delta = false;
};

// sum += delta, then its norm into `normed` (t, h) contiguous of `dtype`.
void pre_norm(const PreNorm& norm, std::int64_t t, std::int64_t h, const Residual& residual, void* normed,
              DType dtype, int num_threads);

}  // namespace apcbatch
