// The Mamba-1 mixer of one layer, its norm included, as one call: what its kernels are given, in which order.
//
// The sequence is that of Gu and Dao 2023, Mamba, section 3.4; each step is the kernel of the same name, so
// the bits are those of the kernels called one by one. Must not know: the other layers, Python.
#pragma once

#include "linear.h"
#include "params.h"
#include "residual.h"

namespace apcbatch {

// Filled once for each layer. d: d_inner, n: d_state, w: taps, r: dt_rank, h: hidden.
struct MixerParams {
    PreNorm norm;
    DType dtype = DType::float32;                   // of the activations and of the convolution's state
    Projection in_proj, x_proj, dt_proj, out_proj;  // (2d, h), (r + 2n, d), (d, r), (h, d)
    std::int64_t d_state = 0, width = 0;            // n, w
    const float* conv_weight = nullptr;             // (d, w)
    const float* conv_bias = nullptr;               // (d) or null
    const float* A = nullptr;                       // (n, d)
    const float* D = nullptr;                       // (d)
    const float* dt_bias = nullptr;                 // (d)
    bool has_norms = false;                         // RMS norms of dt, B and C before they are used
    const float *dt_norm = nullptr, *B_norm = nullptr, *C_norm = nullptr;  // (r), (n), (n); null: ones
    float norm_eps = 0.0f;
    float* ssm = nullptr;  // (num_slots, n, d), slot stride ssm_stride
    std::int64_t ssm_stride = 0;
    void* conv = nullptr;  // (num_slots, w - 1, d), slot stride conv_stride
    std::int64_t conv_stride = 0;
};

// The residual's delta becomes the mixer's result.
void mixer(const MixerParams& params, const RaggedParams& ragged, const Residual& residual, int num_threads);

}  // namespace apcbatch
