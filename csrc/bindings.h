// What the bindings share: how a number from Python becomes an address, a type or a size. Only they know
// Python (pybind11).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "params.h"

namespace py = pybind11;

using Address = std::uintptr_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// The type of this number; ValueError unless the CPU kernels know it.
inline apcbatch::DType dtype_of(int code) {
    if (code == 0 || code == 1) return apcbatch::DType(code);
    throw std::invalid_argument("the CPU kernels take float32 (0) and bfloat16 (1); the type is " +
                                std::to_string(code));
}

// Where `count` values of `bytes` each begin; ValueError if there are some and they are nowhere, or not
// aligned. Whether they go on to the end is for the Python side to know.
inline void* checked(Address address, std::int64_t count, std::int64_t bytes) {
    if (count < 0) throw std::invalid_argument("sizes must be 0 or more; one is " + std::to_string(count));
    if (count > 0 && address == 0) {
        throw std::invalid_argument("a tensor of " + std::to_string(count) +
                                    " rows or values has no memory: was its storage resized?");
    }
    if (address % Address(bytes) != 0) {
        throw std::invalid_argument("values of " + std::to_string(bytes) +
                                    " bytes must lie at a multiple of that; they are at " +
                                    std::to_string(address) + ": clone() the tensor");
    }
    return reinterpret_cast<void*>(address);
}

inline void* values(Address address, int dtype, std::int64_t count) {
    return checked(address, count, apcbatch::bytes_of(dtype_of(dtype)));
}
inline float* floats(Address address, std::int64_t count) {
    return static_cast<float*>(checked(address, count, sizeof(float)));
}
inline std::int64_t* integers(Address address, std::int64_t count) {
    return static_cast<std::int64_t*>(checked(address, count, sizeof(std::int64_t)));
}

constexpr std::int64_t kMaybe = 0;  // for what may be left out

void bind_layers(py::module_& m);  // whole parts of a layer
