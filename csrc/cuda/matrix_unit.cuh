// Products of 16 x 16 by 16 x 8 bfloat16 matrices on tensor cores, and loads of their operands from shared
// memory. A lane holds rows lane / 4 and lane / 4 + 8 of the first operand, and the sums of these rows in
// columns lane % 4 * 2 and the next one.
#pragma once

#include <cstdint>

namespace apcbatch {
namespace cuda {

__device__ __forceinline__ void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b_low, std::uint32_t b_high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

// Loads four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8. The caller has
// synchronised this warp with the threads that wrote them.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}
__device__ __forceinline__ void load_transposed(std::uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row)))
                 : "memory");
}

}  // namespace cuda
}  // namespace apcbatch
