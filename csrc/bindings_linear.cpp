// Python bindings (pybind11) of packed weights and their product.
#include "bindings.h"
#include "huge_pages.h"
#include "linear.h"

namespace apcbatch {
namespace {

// weights: packed, of the type with code `dtype`; 0 if there are runs: the address of the integers of
// PanelRun.
Projection projection(std::int64_t out, std::int64_t in, Address weights, int dtype, Address scale,
                      Address bias, Address runs) {
    const DType type = dtype_of(dtype);
    return {out,
            in,
            runs ? nullptr : values({weights, 0, type}, out),
            type,
            floats(scale, kMaybe),
            floats(bias, kMaybe),
            reinterpret_cast<const PanelRun*>(runs)};
}

void bound_pack_codes(Address codes, std::int64_t stride, Address scales, Address zeros, std::int64_t out,
                      std::int64_t in, Address run, int num_threads) {
    pack_codes(reinterpret_cast<const std::uint8_t*>(codes), stride, floats(scales, out),
               reinterpret_cast<const std::int8_t*>(zeros), out, in, *reinterpret_cast<const PanelRun*>(run),
               num_threads);
}

std::int64_t bound_code_bytes(std::int64_t in, Address run) {
    const PanelRun& of = *reinterpret_cast<const PanelRun*>(run);
    return (of.end - of.begin) * (in / kBlockK * code_bytes(of, kBlockK) + code_bytes(of, in % kBlockK));
}

void bound_want_huge_pages(Address memory, std::int64_t bytes) {
    want_huge_pages(reinterpret_cast<void*>(memory), bytes);
}

void bound_pack_linear(const View& weight, std::int64_t out, std::int64_t in, Address packed,
                       int num_threads) {
    pack_linear(values(weight, out), weight.stride, out, in, weight.dtype,
                values({packed, 0, weight.dtype}, out), num_threads);
}

void bound_unpack_rows(const Projection& weights, Address indices, std::int64_t count, Address rows,
                       int num_threads) {
    unpack_rows(weights, integers(indices, count), count, values({rows, 0, weights.dtype}, count),
                num_threads);
}

void bound_linear(std::int64_t t, const View& x, const Projection& weights, const View& y, int num_threads) {
    linear({weights, {t, values(x, t), x.stride, x.dtype}, nullptr, {t, values(y, t), y.stride, y.dtype}},
           num_threads);
}

}  // namespace
}  // namespace apcbatch

void bind_linear(py::module_& m) {
    using namespace py::literals;
    py::class_<apcbatch::Projection>(m, "Projection")
        .def(py::init(&apcbatch::projection), py::kw_only(), "out_features"_a, "in_features"_a, "weights"_a,
             "dtype"_a, "scale"_a, "bias"_a, "runs"_a);
    m.attr("BLOCK_INPUTS") = apcbatch::kBlockK;
    m.def("packed_bytes", [](std::int64_t out, std::int64_t in, int dtype) {
        return apcbatch::packed_bytes(out, in, apcbatch::dtype_of(dtype));
    });
    m.def("want_huge_pages", &apcbatch::bound_want_huge_pages);
    m.def("pack_linear", &apcbatch::bound_pack_linear, ReleaseGil());
    m.def("code_bytes", &apcbatch::bound_code_bytes);
    m.def("pack_codes", &apcbatch::bound_pack_codes, ReleaseGil());
    m.def("unpack_rows", &apcbatch::bound_unpack_rows, ReleaseGil());
    m.def("linear", &apcbatch::bound_linear, ReleaseGil());
}
