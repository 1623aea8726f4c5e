// Tensor maps (TMA descriptors) of matrices of bfloat16 or of codes, for copies of boxes with 64 columns, of
// codes 128, in the swizzled layouts of chain_steps.cuh and codes.cuh. Needs sm_90.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "products.h"

namespace apcbatch {
namespace cuda {

// Makes the map of a matrix (rows, columns), aligned to 16 bytes. stride: row stride in elements, of a
// multiple of 16 bytes. box_rows: rows of a copy, at most 256. bits: of an element, 16, 8 or 4. The copies'
// column is in bytes for codes.
CUtensorMap tensor_map(const void* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                       int box_rows, int bits = 16);

// Makes the map of scales (see Coding) for copies of those of box_rows rows, a multiple of 4, in a group, not
// swizzled. Coordinates: row, group.
CUtensorMap scale_map(const Coding& coding, std::int64_t rows, std::int64_t columns, int box_rows);

// Makes the map of `parts` consecutive matrices (rows, columns), contiguous, aligned to 16 bytes, for copies
// of box_rows rows of each part. rows, box_rows: multiples of 16. columns: of a multiple of 16 bytes. Of 16
// rows, those with even numbers come first. Coordinates: column, 0, 0, row / 16, 0.
CUtensorMap paired_map(const void* matrices, std::int64_t parts, std::int64_t rows, std::int64_t columns,
                       int box_rows, int bits = 16);

}  // namespace cuda
}  // namespace apcbatch
