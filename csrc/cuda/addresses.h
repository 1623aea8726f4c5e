// Convert Python arguments for the CUDA bindings: device addresses, a stream, a cuBLASLt kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <tuple>

#include "../views.h"
#include "launch.h"
#include "library.h"
#include "rows.h"

namespace apcbatch {
namespace cuda {

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }
inline const std::int64_t* integers(Address address) {
    return static_cast<const std::int64_t*>(pointer(address));
}
inline const float* floats(Address address) { return static_cast<const float*>(pointer(address)); }
inline cudaStream_t stream_of(Address stream) { return static_cast<cudaStream_t>(pointer(stream)); }

// factors, gate, aside, rows of experts, how many a token has, present: addresses or 0, see Pending.
using PendingAddresses = std::tuple<Address, Address, Address, Address, int, Address>;
inline Pending pending_of(const PendingAddresses& its) {
    const auto& [factors, gate, aside, rows, per_token, present] = its;
    return {floats(factors), floats(gate), floats(aside), {floats(rows), per_token, integers(present)}};
}

// Converts the bytes in which Python keeps a cuBLASLt kernel.
inline LibraryChoice choice_of(const std::string& bytes) {
    LibraryChoice choice;
    if (bytes.size() != sizeof choice.data) throw std::invalid_argument("a choice has 64 bytes");
    std::memcpy(choice.data, bytes.data(), sizeof choice.data);
    return choice;
}

void bind_rows(py::module_& module);
void bind_experts(py::module_& module);
void bind_heads(py::module_& module);
void bind_program(py::module_& module);
void bind_products(py::module_& module);

}  // namespace cuda
}  // namespace apcbatch
