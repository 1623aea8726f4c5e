// Descriptions of matrices for tensor copies: bfloat16, boxes of rows of 64 columns, swizzled as
// chain_steps.cuh says. Must not know: kernels. Needs sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace apcbatch {
namespace cuda {

// Of a matrix (rows, columns) with rows `stride` elements apart, a multiple of 8, that begins at a multiple
// of 16 bytes. box_rows: of a copy, 256 at most.
CUtensorMap tensor_map(const void* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                       int box_rows);

}  // namespace cuda
}  // namespace apcbatch
