// Products y = x W^T with fixed-order accumulation.
//
// Each element is one float32 sum (a chain) over the inputs in ascending order. bfloat16 inputs are added 16
// at a time by one tensor-core instruction, float32 inputs one at a time by fused multiply-adds. For weights
// with few rows the inputs are cut into pieces, each with its own sum, and these sums are added in ascending
// order. The weights' shape alone gives the number of pieces. Neither the tiling nor the number of rows
// changes a bit.
#pragma once

#include <type_traits>

#include "launch.h"

namespace apcbatch {
namespace cuda {

// How weights are encoded: see codes.h. none: they are bfloat16 or float32.
enum class CodeKind : int { none = 0, fp8 = 1, int8 = 2, int4 = 3 };

// Calls function(std::integral_constant of the kind).
template <class Function>
void with_kind(CodeKind kind, const Function& function) {
    switch (kind) {
        case CodeKind::none:
            return function(std::integral_constant<CodeKind, CodeKind::none>());
        case CodeKind::fp8:
            return function(std::integral_constant<CodeKind, CodeKind::fp8>());
        case CodeKind::int8:
            return function(std::integral_constant<CodeKind, CodeKind::int8>());
        case CodeKind::int4:
            return function(std::integral_constant<CodeKind, CodeKind::int4>());
    }
}

struct Coding {
    CodeKind kind = CodeKind::none;
    int shift = 0;  // inputs >> shift is their group: 5, 6, 7, or 31 for one group
    // (groups, stride), a scale for each row, times 2^120 for fp8. They are exact in bfloat16. For int4, the
    // lowest 7 bits are the zero plus 8.
    const float* scales = nullptr;
    std::int64_t stride = 0;  // a multiple of 4

    int bits() const { return kind == CodeKind::none ? 16 : kind == CodeKind::int4 ? 4 : 8; }
};

struct ProductParams {
    int rows, in, out;          // rows of x and y; columns of x; columns of y
    DType dtype;                // dtype of weight and x
    const void* weight;         // (out, in), contiguous
    const void* x;              // (rows, in)
    std::int64_t x_stride;      // row stride in elements
    void* y;                    // (rows, out) contiguous
    DType y_dtype;              // float32 or bfloat16
    int pieces;                 // 1, 2, 4 or 8, each a multiple of 16 inputs; 1 in float32
    Coding coding = {};         // of weights that are encoded
    std::int64_t y_stride = 0;  // row stride of y; 0: out
};

constexpr int kMostFewRows = 32, kMostMixerRows = 8, kMostPieces = 8;

// Computes a product for any number of rows by kernels of ours: the specification of the bits. bfloat16:
// weights and addresses as few_rows_product takes them; the weights are read once for 32 rows.
void own_product(const ProductParams& params, cudaStream_t stream);

// Computes y[i] = parts[i] + parts[count + i] + ..., in ascending order.
void sum_pieces(const float* parts, std::int64_t count, int pieces, void* y, DType y_dtype,
                cudaStream_t stream);

// Computes y[row, column] = x[row, column] * factors[column], rounded once. x: (rows, columns) float32,
// contiguous like y, and may be y.
void scale_columns(const float* x, const float* factors, std::int64_t rows, std::int64_t columns, void* y,
                   DType y_dtype, cudaStream_t stream);

// Returns true if `in` inputs can be cut into `pieces` pieces.
bool takes_pieces(int in, int pieces);

// Returns true if few_rows_product supports these sizes and addresses on the current device.
bool takes_few_rows(const ProductParams& params);

// Computes a bfloat16 product of at most kMostFewRows rows, reading the weights once, at memory bandwidth.
void few_rows_product(const ProductParams& params, cudaStream_t stream);

// Fuse a product of a mixer with the op after it, in a decode pass: at most kMostMixerRows rows, one token
// per sequence, weights in one piece. The product's y is not written. in_proj: the first d_inner columns are
// the convolution's x, the others are written to rest (rows, out - d_inner).
void few_rows_convolution(const ProductParams& product, const ConvParams& convolution, void* rest,
                          cudaStream_t stream);
// dt_proj: the columns are the scan's dt.
void few_rows_step(const ProductParams& product, const ScanParams& scan, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
