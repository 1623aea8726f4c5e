// What the bindings share. Only they know Python (pybind11).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace py = pybind11;

using Address = std::uintptr_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }

void bind_layers(py::module_& m);  // whole parts of a layer
