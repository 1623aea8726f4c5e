// The one file that knows Python (pybind11). Kernels take addresses and strides; the Python side checks
// shapes.
#include <pybind11/pybind11.h>

#include <string>

#include "dispatch.h"
#include "linear.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// ---- instruction sets

constexpr apcbatch::Isa kIsas[] = {apcbatch::Isa::plain, apcbatch::Isa::avx2, apcbatch::Isa::avx512,
                                   apcbatch::Isa::avx512bf16};

bool set_isa(const std::string& name) {
    for (const apcbatch::Isa isa : kIsas) {
        if (name == apcbatch::isa_name(isa)) return apcbatch::set_isa(isa);
    }
    return false;
}

void bind_isa(py::module_& m) {
    m.def("isa", [] { return apcbatch::isa_name(apcbatch::isa()); });
    m.def("set_isa", &set_isa);  // false where the processor lacks it or the name is none
    m.def("available_isas", [] {
        py::list names;
        for (const apcbatch::Isa isa : kIsas) {
            if (apcbatch::isa_available(isa)) names.append(apcbatch::isa_name(isa));
        }
        return names;
    });
}

// ---- linear

void pack_linear(Address weight, int64_t stride, int64_t out, int64_t in, int dtype, Address packed) {
    apcbatch::pack_linear(pointer(weight), stride, out, in, apcbatch::DType(dtype), pointer(packed));
}

void unpack_rows(Address packed, int64_t out, int64_t in, int dtype, Address indices, int64_t count,
                 Address rows) {
    apcbatch::unpack_rows(pointer(packed), out, in, apcbatch::DType(dtype),
                          static_cast<const int64_t*>(pointer(indices)), count, pointer(rows));
}

void linear(int64_t t, int64_t in, int64_t out, Address x, int64_t x_stride, int x_dtype, Address w,
            int w_dtype, Address bias, Address y, int64_t y_stride, int y_dtype, int num_threads) {
    apcbatch::LinearArgs args;
    args.t = t;
    args.in = in;
    args.out = out;
    args.x = pointer(x);
    args.x_stride = x_stride;
    args.x_dtype = apcbatch::DType(x_dtype);
    args.w = pointer(w);
    args.w_dtype = apcbatch::DType(w_dtype);
    args.bias = static_cast<const float*>(pointer(bias));
    args.y = pointer(y);
    args.y_stride = y_stride;
    args.y_dtype = apcbatch::DType(y_dtype);
    apcbatch::linear(args, num_threads);
}

void bind_linear(py::module_& m) {
    m.def("packed_bytes", [](int64_t out, int64_t in, int dtype) {
        return apcbatch::packed_bytes(out, in, apcbatch::DType(dtype));
    });
    m.def("pack_linear", &pack_linear, ReleaseGil());
    m.def("unpack_rows", &unpack_rows, ReleaseGil());
    m.def("linear", &linear, ReleaseGil());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "apcbatch kernels: plain C++ over addresses, sizes and strides (private; see apcbatch.kernels.ops)";
    bind_isa(m);
    bind_linear(m);
}
