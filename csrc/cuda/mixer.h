// Mamba mixers, one after the other: the launches of their ops in one call, so that the host is soon done.
// The bits are those of the ops. No Python, no torch.
#pragma once

#include "batch.h"
#include "library.h"
#include "rows.h"

namespace apcbatch {
namespace cuda {

// Weights (out, in) of a product of chains.
struct ChainWeights {
    const void* weight;
    int out, in, pieces;
};

// What multiplies: a kernel of the library, which adds up the pieces in turn or not; else kernels of our own.
struct ChainKernel {
    bool of_library, in_turn;
    LibraryChoice choice;
};

struct MixerKernels {
    ChainKernel in_proj, x_proj, dt_proj, out_proj;
};

// What stays the same from pass to pass. Letters: h hidden, d d_inner, n d_state, r dt_rank.
struct Mixer {
    DType dtype;                                      // of weights and inputs of products
    ChainWeights in_proj, x_proj, dt_proj, out_proj;  // (2d, h), (r + 2n, d), (d, r), (h, d)
    NormParams norm;                                  // weight and eps
    bool has_inner_norms;
    NormParams dt_norm, B_norm, C_norm;  // weight and eps
    ConvParams convolution;              // all but the batch, x and out
    ScanParams scan;                     // all but the batch, x, dt, B, C, z and out
};

struct MixerPass {
    Batch batch;
    float* sum;          // (t, h) contiguous: the residual stream, which the delta is added to
    const float* delta;  // (t, h) contiguous or null
    float* left;         // (t, h) contiguous: the last mixer's result; may be where the delta is
    void* workspace;     // workspace_bytes at a multiple of 256
    MixerKernels kernels;
};

std::size_t workspace_bytes(const Mixer& mixer, std::int64_t tokens, const MixerKernels& kernels);

// All of one shape; each adds what the one before it left.
void run_mixers(const std::vector<const Mixer*>& mixers, const MixerPass& pass, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
