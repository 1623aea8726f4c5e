// Launch all kernels of several Mamba mixers by one call, to save host time. The bits equal those of the ops.
#pragma once

#include "launch.h"
#include "library.h"
#include "rows.h"

namespace apcbatch {
namespace cuda {

// Weights (out, in) of a fixed-order product.
struct ChainWeights {
    const void* weight;
    int out, in, pieces;
};

// Kernel of a product: a cuBLASLt kernel and its in_turn (see library.h), or our own kernel.
struct ChainKernel {
    bool of_library, in_turn;
    LibraryChoice choice;
};

struct MixerKernels {
    ChainKernel in_proj, x_proj, dt_proj, out_proj;
};

// Mixer: all that is constant over passes. h: hidden, d: d_inner, n: d_state, r: dt_rank.
struct Mixer {
    DType dtype;                                      // dtype of weights and of the products' inputs
    ChainWeights in_proj, x_proj, dt_proj, out_proj;  // (2d, h), (r + 2n, d), (d, r), (h, d)
    NormParams norm;                                  // weight and eps
    bool has_inner_norms;
    NormParams dt_norm, B_norm, C_norm;  // weight and eps
    ConvParams convolution;              // all but the batch, x and out
    ScanParams scan;                     // all but the batch, x, dt, B, C, z and out
};

struct MixerPass {
    Batch batch;
    float* sum;          // (t, h) contiguous: residual stream, to which delta is added
    const float* delta;  // (t, h) contiguous or null
    float* left;         // (t, h) contiguous: output of the last mixer; may be the memory of delta
    void* workspace;     // workspace_bytes bytes, aligned to 256
    MixerKernels kernels;
};

std::size_t workspace_bytes(const Mixer& mixer, std::int64_t tokens, const MixerKernels& kernels);

// Runs the mixers, all of one shape, in order. Each adds the previous one's output to the sum.
void run_mixers(const std::vector<const Mixer*>& mixers, const MixerPass& pass, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
