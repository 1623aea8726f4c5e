// Products of 64 x 16 by 16 x columns matrices by the four warps of a warpgroup, of bfloat16 in shared
// memory, where slices of 64 inputs lie as chain_steps.cuh says, from a multiple of 1 KB on. A warp has 16 of
// the 64 rows; of every 8 columns a lane holds the sums of row lane / 4 in columns lane % 4 * 2 and the next
// one, then those of the row 8 further down. An element is one chain of its steps. Must not know: kernels.
// Needs sm_90a.
#pragma once

#include <cstdint>

namespace apcbatch {
namespace cuda {

// Of rows of a slice that begin at this address in shared memory: swizzled by 128 bytes, 1 KB from octet to
// octet.
__device__ __forceinline__ std::uint64_t rows_at(unsigned shared) {
    return std::uint64_t(shared >> 4) | std::uint64_t(1) << 16 | std::uint64_t(1024 >> 4) << 32 |
           std::uint64_t(1) << 62;
}
constexpr int kStepBytes = 32;  // from step to step of a slice, wherever the swizzle puts them

// Before the first of products: registers that hold sums are as the warps left them.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Those since the last call are one group.
__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all groups but the last kLeft are done.
template <int kLeft>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define APC_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define APC_SUMS_20(i) \
    APC_SUMS_4(i), APC_SUMS_4(i + 4), APC_SUMS_4(i + 8), APC_SUMS_4(i + 12), APC_SUMS_4(i + 16)

// Adds rows a times rows b, transposed, over 16 inputs, to the sums of 16, 40 or 80 columns, the rows of b.
__device__ __forceinline__ void add_product(float (&sums)[8], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, "
        "1, "
        "1, 0, 0;"
        : APC_SUMS_4(0), APC_SUMS_4(4)
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void add_product(float (&sums)[20], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
        "%11, %12, %13, %14, %15, %16, %17, %18, %19}, %20, %21, 1, 1, 1, 0, 0;"
        : APC_SUMS_20(0)
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void add_product(float (&sums)[40], std::uint64_t a, std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
        "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, "
        "%31, %32, %33, %34, %35, %36, %37, %38, %39}, %40, %41, 1, 1, 1, 0, 0;"
        : APC_SUMS_20(0), APC_SUMS_20(20)
        : "l"(a), "l"(b));
}

#undef APC_SUMS_20
#undef APC_SUMS_4

// After await_products: sums are read no earlier.
template <int kSums>
__device__ __forceinline__ void settle(float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace cuda
}  // namespace apcbatch
