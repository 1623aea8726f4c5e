// apcbatch._C for Python (pybind11): the functions that its files bind. They take views, addresses and sizes;
// the Python side checks shapes. An absent optional argument is 0 or None.
#pragma once

#include "views.h"

void bind_linear(py::module_& m);     // the packed product
void bind_rows(py::module_& m);       // norms, gates, choices
void bind_attention(py::module_& m);  // the paged cache
void bind_recurrent(py::module_& m);  // causal_conv, selective_scan
void bind_layers(py::module_& m);     // whole parts of a layer
void bind_stack(py::module_& m);      // a whole pass
