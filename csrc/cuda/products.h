// Products y = x W^T of chains. In bfloat16: 16 inputs after 16 inputs in ascending order, each added to one
// float32 sum by one instruction of the matrix units. In float32: input after input, by fused multiply-adds.
// Where there are few rows of weights, the inputs are cut into pieces, a chain each, which are added in
// ascending order: how many is settled by the weights' shape. How the work is cut otherwise, and how many
// rows come together, changes no bit. No Python, no torch.
#pragma once

#include "launch.h"

namespace apcbatch {
namespace cuda {

struct ProductParams {
    int rows, in, out;      // of x and y; columns of x; columns of y
    DType dtype;            // of weight and x
    const void* weight;     // (out, in), contiguous
    const void* x;          // (rows, in)
    std::int64_t x_stride;  // elements from row to row
    void* y;                // (rows, out) contiguous
    DType y_dtype;          // float32 or bfloat16
    int pieces;             // 1, 2, 4 or 8, each a multiple of 16 inputs; 1 in float32
};

constexpr int kMostFewRows = 32, kMostMixerRows = 8, kMostPieces = 8;

// In float32, for any rows: slow, to compare with.
void chain_product(const ProductParams& params, cudaStream_t stream);

// y[i] = parts[i] + parts[count + i] + ..., in ascending order.
void sum_pieces(const float* parts, std::int64_t count, int pieces, void* y, DType y_dtype,
                cudaStream_t stream);

// Whether so many inputs can be cut so.
bool takes_pieces(int in, int pieces);

// Whether few_rows_product takes these sizes and addresses on the current device.
bool takes_few_rows(const ProductParams& params);

// In bfloat16, for kMostFewRows rows at most: reads the weights once, at the memory's speed.
void few_rows_product(const ProductParams& params, cudaStream_t stream);

// The same for kMostMixerRows rows at most of weights in one piece, and the op after it in a decode pass of a
// mixer, one token of each sequence; y is not written.
// in_proj: half of the columns are the convolution's x, the others z (rows, d_inner).
void few_rows_convolution(const ProductParams& product, const ConvParams& convolution, void* z,
                          cudaStream_t stream);
// dt_proj: the columns are the scan's dt.
void few_rows_step(const ProductParams& product, const ScanParams& scan, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
