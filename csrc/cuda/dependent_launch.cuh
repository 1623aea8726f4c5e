// Programmatic dependent launch: a kernel begins while the previous kernel in the stream still runs.
//
// Before it calls await_before, a kernel may only read memory that no kernel writes. Every thread calls it,
// so that waiting for a kernel includes waiting for all kernels before it. On devices before sm_90 a kernel
// begins when the previous one has ended.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"

namespace apcbatch {
namespace cuda {

// Lets the next kernel begin, once all blocks of this kernel have called it.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernels have ended and their writes are visible.
__device__ __forceinline__ void await_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline bool begins_early() { return attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9; }

// Launches a kernel in clusters. cluster: blocks per cluster; more than one needs sm_90.
template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int cluster, int shared_bytes,
                     cudaStream_t stream, const char* name, Arguments... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = unsigned(cluster);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = std::size_t(shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : begins_early() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes,
                      cudaStream_t stream, const char* name, Arguments... arguments) {
    launch_clusters(kernel, blocks, threads, 1, shared_bytes, stream, name, arguments...);
}

}  // namespace cuda
}  // namespace apcbatch
