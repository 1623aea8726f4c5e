// Asynchronous copies from global to shared memory (cp.async).
#pragma once

#include <cuda_runtime.h>

namespace apcbatch {
namespace cuda {

// Copies `bytes` bytes of 16, and writes zeros for the rest. Both addresses are multiples of 16; `to` is one
// in shared memory.
__device__ __forceinline__ void copy_bytes(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// Copies 16 bytes, or writes zeros unless `there`. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_chunk(void* to, const void* from, bool there) {
    copy_bytes(unsigned(__cvta_generic_to_shared(to)), from, there ? 16 : 0);
}

// Copies 8 bytes. Both addresses are multiples of 8.
__device__ __forceinline__ void copy_eight(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}

// Copies 4 bytes. Both addresses are multiples of 4.
__device__ __forceinline__ void copy_four(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
}

// Asks for the line of an address in the L2 cache. No later load reads old bytes, even if another
// thread writes them meanwhile.
__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Groups all copies started since the last commit.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's groups except the latest kLater. Copies of other threads are visible after
// those threads have waited too and a barrier has followed.
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace cuda
}  // namespace apcbatch
