// Products of a 64 x 16 by a 16 x N matrix by a warpgroup (wgmma), with operands in shared memory: slices of
// 64 inputs, in the swizzled layout of chain_steps.cuh. Lane l of warp w of the warpgroup has the sums of
// rows 16 w + l / 4 and 8 more: sums[4 j + 2 h + i] is that of row 16 w + l / 4 + 8 h and column 8 j + l % 4
// * 2 + i. Needs sm_90a.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "chain_steps.cuh"

namespace apcbatch {
namespace cuda {

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // rows of the first operand
constexpr int kDescribedStep = 2;   // from a step's descriptor to the next one's

// Describes a slice, at an address in shared memory that is a multiple of kOctetBytes.
__device__ __forceinline__ std::uint64_t described(unsigned shared) {
    constexpr std::uint64_t kSwizzled = std::uint64_t(1) << 62, kOctets = std::uint64_t(kOctetBytes / 16)
                                                                          << 32;
    return kSwizzled | kOctets | std::uint64_t(1) << 16 | shared >> 4;
}

// Describes a second operand of up to 128 columns, whose 16 rows of inputs are in shared memory, from this
// address on: for each 64 columns a slice of kSliceRow bytes a row; the slices are `apart` bytes apart.
__device__ __forceinline__ std::uint64_t described_rows(unsigned shared, int apart) {
    return described(shared) - (std::uint64_t(1) << 16) + (std::uint64_t(apart / 16) << 16);
}

// Orders copies by copy_chunk that this thread has waited for before the products it starts.
__device__ __forceinline__ void show_to_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Precedes the first product of a group: no register of the sums is written later than here.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all of this warp's groups of products except the latest kLater.
template <int kLater>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}

// Keeps the compiler from moving accesses to the sums across this place.
template <int kSums>
__device__ __forceinline__ void hold(float (&sums)[kSums]) {
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// The same for an operand that a product may still read.
__device__ __forceinline__ void hold(std::uint32_t (&operand)[4]) {
#pragma unroll
    for (std::uint32_t& one : operand) asm volatile("" : "+r"(one)::"memory");
}

// Change the number of registers of a thread of this warpgroup.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#define APC_SUMS_8(i)                                                                          \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
        "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define APC_SUMS_16(i) APC_SUMS_8(i), APC_SUMS_8(i + 8)
#define APC_NAMES_0                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15"
#define APC_NAMES_1                            \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define APC_NAMES_2                            \
    "%32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define APC_NAMES_3                            \
    "%48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define APC_NAMES_4                            \
    "%64, %65, %66, %67, %68, %69, %70, %71, " \
    "%72, %73, %74, %75, %76, %77, %78, %79"

// Adds the product of 64 rows and `columns` rows over one step, of 16 inputs, to the sums. The 64 rows are in
// shared memory, or in registers, in the layout of multiply_add for each warp; these may be written again
// once the caller has waited for the product. kOfRows: the second operand is described_rows.
#define APC_WARPGROUP_PRODUCT(columns, names, a_name, b_name, a_names, next_name, last_name, ...)            \
    __device__ __forceinline__ void add_step(float (&sums)[columns / 2], std::uint64_t a, std::uint64_t b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, " a_name   \
                     ", " b_name ", 1, 1, 1, 0, 0;"                                                          \
                     : __VA_ARGS__                                                                           \
                     : "l"(a), "l"(b));                                                                      \
    }                                                                                                        \
    template <bool kOfRows = false>                                                                          \
    __device__ __forceinline__ void add_step(float (&sums)[columns / 2], const std::uint32_t (&a)[4],        \
                                             std::uint64_t b) {                                              \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, {" a_names \
                     "}, " next_name ", 1, 1, 1, " last_name ";"                                             \
                     : __VA_ARGS__                                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kOfRows)));               \
    }
APC_WARPGROUP_PRODUCT(32, APC_NAMES_0, "%16", "%17", "%16, %17, %18, %19", "%20", "%21", APC_SUMS_16(0))
APC_WARPGROUP_PRODUCT(64, APC_NAMES_0 ", " APC_NAMES_1, "%32", "%33", "%32, %33, %34, %35", "%36", "%37",
                      APC_SUMS_16(0), APC_SUMS_16(16))
APC_WARPGROUP_PRODUCT(96, APC_NAMES_0 ", " APC_NAMES_1 ", " APC_NAMES_2, "%48", "%49", "%48, %49, %50, %51",
                      "%52", "%53", APC_SUMS_16(0), APC_SUMS_16(16), APC_SUMS_16(32))
APC_WARPGROUP_PRODUCT(128, APC_NAMES_0 ", " APC_NAMES_1 ", " APC_NAMES_2 ", " APC_NAMES_3, "%64", "%65",
                      "%64, %65, %66, %67", "%68", "%69", APC_SUMS_16(0), APC_SUMS_16(16), APC_SUMS_16(32),
                      APC_SUMS_16(48))
APC_WARPGROUP_PRODUCT(160, APC_NAMES_0 ", " APC_NAMES_1 ", " APC_NAMES_2 ", " APC_NAMES_3 ", " APC_NAMES_4,
                      "%80", "%81", "%80, %81, %82, %83", "%84", "%85", APC_SUMS_16(0), APC_SUMS_16(16),
                      APC_SUMS_16(32), APC_SUMS_16(48), APC_SUMS_16(64))
#undef APC_WARPGROUP_PRODUCT
#undef APC_NAMES_0
#undef APC_NAMES_1
#undef APC_NAMES_2
#undef APC_NAMES_3
#undef APC_NAMES_4
#undef APC_SUMS_16
#undef APC_SUMS_8

}  // namespace cuda
}  // namespace apcbatch
