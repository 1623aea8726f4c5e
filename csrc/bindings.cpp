// The one file that knows Python (pybind11). Kernels take addresses and strides; the Python side checks shapes.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.doc() = "apcbatch kernels: plain C++ over addresses, sizes and strides (private; see apcbatch.kernels.ops)";
}
