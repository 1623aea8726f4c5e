// Launches that begin while the kernel before them in the stream still runs. Such a kernel may read what no
// kernel writes, and must await the ones before it ahead of all else; every thread of it does, so that
// whoever awaits it has awaited them too. On devices before sm_90 it begins when the one before has ended.
// Must not know: kernels.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"

namespace apcbatch {
namespace cuda {

// The kernel after this one may begin, once all blocks have said so.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended and what they wrote is there.
__device__ __forceinline__ void await_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline bool begins_early() { return attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9; }

// cluster: blocks of one; more than one on sm_90 only.
template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, int cluster,
                     int shared_bytes, cudaStream_t stream, const char* name, Arguments... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = unsigned(cluster);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = std::size_t(shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : begins_early() ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, int shared_bytes,
                      cudaStream_t stream, const char* name, Arguments... arguments) {
    launch_clusters(kernel, blocks, threads, 1, shared_bytes, stream, name, arguments...);
}

}  // namespace cuda
}  // namespace apcbatch
