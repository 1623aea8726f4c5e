// Python bindings of apcbatch._C (pybind11), one function per file. Bound functions take views, addresses and
// sizes; the Python side checks shapes. An absent optional argument is 0 or None.
#pragma once

#include "views.h"

// Returns a kernel as a function of what its arguments are made of, and of a number of threads.
template <class Params, class... Arguments>
auto bound(void (*kernel)(const Params&, int), Params (*params)(Arguments...)) {
    return [=](Arguments... arguments, int num_threads) { kernel(params(arguments...), num_threads); };
}

void bind_linear(py::module_& m);     // packed matrix product
void bind_rows(py::module_& m);       // norms, gated product, logits
void bind_attention(py::module_& m);  // paged attention
void bind_recurrent(py::module_& m);  // causal_conv, selective_scan, head_scan
void bind_layers(py::module_& m);     // fused sub-blocks
void bind_stack(py::module_& m);      // a whole pass
void bind_drafts(py::module_& m);     // drafts of exact speculation
