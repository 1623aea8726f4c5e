// Barriers in shared memory (mbarrier) that also track asynchronous copies. Needs sm_90.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace apcbatch {
namespace cuda {

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return unsigned(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
    unsigned done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

// Arrives, and adds `bytes` to the bytes that the barrier waits for.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Starts a copy of `bytes` bytes from global memory, a multiple of 16, like both addresses.
__device__ __forceinline__ void bulk_copy(unsigned to, const void* from, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Asks for the same bytes in the L2 cache, like prefetch.
__device__ __forceinline__ void bulk_prefetch(const void* from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Starts the copy of a box of a matrix (see tensor_map.h) at this column and row. Elements outside the matrix
// become zero. The barrier counts all bytes of the box, including these.
__device__ __forceinline__ void tensor_copy(unsigned to, const CUtensorMap* matrix, int column, int row,
                                            unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(matrix), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same for a paired map.
__device__ __forceinline__ void paired_copy(unsigned to, const CUtensorMap* matrices, int column, int row,
                                            unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %4, %4, "
        "%3, "
        "%4}], [%5];" ::"r"(to),
        "l"(matrices), "r"(column), "r"(row / 16), "r"(0), "r"(barrier)
        : "memory");
}

// Makes a map in global memory that the host wrote visible to tensor copies. Call it before the first copy by
// the map.
__device__ __forceinline__ void acquire_map(const CUtensorMap* matrix) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(matrix) : "memory");
}

// Arrives once all copies that this thread started by copy_chunk have completed.
__device__ __forceinline__ void arrive_with_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Barrier of a cluster: each thread arrives once. After the wait, all blocks of the cluster have begun.
__device__ __forceinline__ void arrive_at_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Returns the address of the same variable in the first block of the cluster.
__device__ __forceinline__ unsigned first_block(unsigned shared) {
    unsigned far;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(far) : "r"(shared));
    return far;
}
__device__ __forceinline__ void store_far(unsigned to, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
// Arrives at a barrier of another block. After the wait, this thread's stores are visible there.
__device__ __forceinline__ void arrive_far(unsigned barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_far(unsigned barrier, unsigned parity) {
    unsigned done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

}  // namespace cuda
}  // namespace apcbatch
