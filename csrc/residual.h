// Residual stream between sub-blocks: a running sum, the pending output of the last sub-block, and the RMS
// norm at the beginning of the next.
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

// Adds delta to sum if has_delta, then writes the sum's norm to `normed`, (t, h) contiguous in `dtype`.
void pre_norm(const PreNorm& norm, std::int64_t t, std::int64_t h, const Residual& residual, void* normed,
              DType dtype, int num_threads);

}  // namespace apcbatch
