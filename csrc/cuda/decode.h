// A decode pass of a whole stack of Mamba mixers in one launch: what it is called with. Every address is on
// the device. No Python, no torch.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

constexpr int kMostDecodeRows = 8;  // sequences of one launch; the kernels have 1, 2, 4 or 8

// Dimensions: h hidden, d d_inner, n d_state, r dt_rank, w taps, v vocabulary.
struct DecodeShape {
    DType dtype;  // of the weights and the activations: float32 or bfloat16
    int hidden, d_inner, d_state, dt_rank, width, vocab;
};

// One mixer and its norm; weights (out, in) contiguous, aligned to 16 bytes. Null: no bias; a norm of ones.
struct DecodeLayer {
    const void *in_proj, *x_proj, *dt_proj, *out_proj;  // (2d, h), (r + 2n, d), (d, r), (h, d)
    const float *norm, *in_bias, *out_bias;             // (h), (2d), (h)
    const float *conv_weight, *conv_bias;               // (d, w), (d)
    const float *A, *D, *dt_bias;                       // (n, d), (d), (d)
    const float *dt_norm, *B_norm, *C_norm;             // (r), (n), (n)
    float* ssm;                                         // (slots, n, d)
    void* conv;                                         // (slots, w - 1, d)
};

struct DecodeParams {
    RaggedParams ragged;  // one token a sequence, `rows` of them
    DecodeShape shape;
    int rows, num_layers;
    const DecodeLayer* layers;  // (num_layers)
    bool inner_norms;           // of dt, B and C
    float norm_eps, inner_eps;
    const float* final_norm;               // (h) or null
    const void* head;                      // (v, h) contiguous
    std::int64_t ssm_stride, conv_stride;  // elements from slot to slot
    float* residual;                       // (rows, h): the embedding; changed
    void *x, *z, *y, *low;                 // scratch: (rows, d) three times, (rows, r + 2n)
    float* logits;                         // (rows, v)
    unsigned* arrivals;                    // zero
};

// The most sequences, a power of two, that `decode` takes of this shape on the current device; 0 for none.
int most_decode_rows(const DecodeShape& shape);

void decode(const DecodeParams& params, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
