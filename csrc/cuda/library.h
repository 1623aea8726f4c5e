// The matrix products of cuBLASLt without a split of the inputs: which kernels there are for a shape, and one
// of them called by name. The library is the one that the process has loaded already. No Python, no torch.
#pragma once

#include <vector>

#include "products.h"

namespace apcbatch {
namespace cuda {

// One of the library's kernels and how it is to be run, as the library writes it.
struct LibraryChoice {
    std::uint64_t data[8];
};

// The library's own choices for these sizes, its favourite first; `most` at most.
std::vector<LibraryChoice> library_choices(const ProductParams& params, int most);

// The product by this choice, of several pieces each by itself: y is (pieces, rows, out) then; its sizes need
// not be those that it was found for. False where the library does not run it so.
bool library_product(const ProductParams& params, const LibraryChoice& choice, cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
