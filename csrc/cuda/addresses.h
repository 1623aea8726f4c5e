// How the files of bindings see what Python gives them: addresses of the device, a stream, a packed batch.
#pragma once

#include <cuda_runtime_api.h>

#include "../views.h"
#include "launch.h"

namespace apcbatch {
namespace cuda {

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }
inline const std::int64_t* integers(Address address) {
    return static_cast<const std::int64_t*>(pointer(address));
}
inline const float* floats(Address address) { return static_cast<const float*>(pointer(address)); }
inline cudaStream_t stream_of(Address stream) { return static_cast<cudaStream_t>(pointer(stream)); }

// A packed batch on the device, its sequences ordered: the longer ones first, then those of one token.
struct Batch {
    apcbatch::RaggedParams ragged;
    std::int64_t num_tokens, longest;
    Selection longer, single;
};

void bind_rows(py::module_& module);
void bind_experts(py::module_& module);
void bind_products(py::module_& module);

}  // namespace cuda
}  // namespace apcbatch
