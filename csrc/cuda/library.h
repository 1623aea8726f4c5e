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

// The library's own choices for these sizes, its favourite first; `most` at most. in_turn: as below.
std::vector<LibraryChoice> library_choices(const ProductParams& params, bool in_turn, int most);

// The product by this choice; its sizes need not be those that it was found for. False where the library does
// not run it so. Of several pieces: each by itself, and y is (pieces, rows, out); or, in_turn, one after the
// other is added to y, which is float32, in ascending order.
bool library_product(const ProductParams& params, bool in_turn, const LibraryChoice& choice,
                     cudaStream_t stream);

}  // namespace cuda
}  // namespace apcbatch
