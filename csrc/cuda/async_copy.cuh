// Copies from global into shared memory that a thread does not wait for until it says so. Must not know:
// kernels.
#pragma once

#include <cuda_runtime.h>

namespace apcbatch {
namespace cuda {

// 16 bytes, or zeros; both addresses are multiples of 16.
__device__ __forceinline__ void copy_chunk(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     unsigned(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}

// What was asked for since the last time becomes one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the latest kLater; what the other threads copied is there once they have waited
// and met.
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace cuda
}  // namespace apcbatch
