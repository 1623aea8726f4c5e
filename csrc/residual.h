// The residual stream as a part of a layer meets it: what the part before left to be added, and the RMS norm
// that this part begins with. Must not know: what the part computes.
#pragma once

#include "params.h"

namespace apcbatch {

struct PreNorm {
    const float* weight = nullptr;  // (h)
    float eps = 0.0f;
};

// Both (t, h) contiguous. has_delta: delta is to be added first; in any case the part's result takes its
// place.
struct Residual {
    float* sum = nullptr;
    float* delta = nullptr;
    bool has_delta = false;
};

// sum += delta, then its norm into `normed` (t, h) contiguous of `dtype`.
void pre_norm(const PreNorm& norm, std::int64_t t, std::int64_t h, const Residual& residual, void* normed,
              DType dtype, int num_threads);

}  // namespace apcbatch
