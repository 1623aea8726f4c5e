// Tensor maps (TMA descriptors) of bfloat16 matrices, for copies of boxes with 64 columns, in the swizzled
// layout of chain_steps.cuh. Needs sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace apcbatch {
namespace cuda {

// Makes the map of a matrix (rows, columns), aligned to 16 bytes. stride: row stride in elements, a multiple
// of 8. box_rows: rows of a copy, at most 256.
CUtensorMap tensor_map(const void* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                       int box_rows);

// Makes the map of `parts` consecutive matrices (rows, columns), contiguous, aligned to 16 bytes, for copies
// of box_rows rows of each part. rows, box_rows: multiples of 16. columns: a multiple of 8. Of 16 rows, those
// with even numbers come first. Coordinates: column, 0, 0, row / 16, 0.
CUtensorMap paired_map(const void* matrices, std::int64_t parts, std::int64_t rows, std::int64_t columns,
                       int box_rows);

}  // namespace cuda
}  // namespace apcbatch
