// Matrix products of cuBLASLt without split-K: list its kernels for a shape, and run one of them. Uses the
// library that the process has already loaded.
#pragma once

#include <vector>

#include "products.h"

namespace apcbatch {
namespace cuda {

// cuBLASLt kernel with its configuration, in the library's own format.
struct LibraryChoice {
    std::uint64_t data[8];
};

// Returns at most `most` kernels that cuBLASLt proposes for these sizes, in its own ranking. in_turn: see
// library_product.
std::vector<LibraryChoice> library_choices(const ProductParams& params, bool in_turn, int most);

// Computes the product by this kernel, whose sizes may differ from those that it was proposed for. Returns
// false if cuBLASLt does not support that. With several pieces, y is (pieces, rows, out), a result per piece.
// in_turn: the pieces are instead added to one y, in float32, in ascending order.
bool library_product(const ProductParams& params, bool in_turn, const LibraryChoice& choice,
                     cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
