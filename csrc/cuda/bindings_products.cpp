// Python bindings (pybind11) of apcbatch._CUDA: products with fixed-order accumulation. The Python side
// checks shapes and keeps the memory alive until the kernels have run.
#include <pybind11/stl.h>

#include "addresses.h"
#include "codes.h"

namespace apcbatch {
namespace cuda {
namespace {

// Makes the ProductParams of a product. dtype: of weight and x.
ProductParams product(int rows, int in, int out, int dtype, Address weight, Address x, std::int64_t x_stride,
                      Address y, int y_dtype, int pieces) {
    return {rows,       in,       out,        dtype_of(dtype),   pointer(weight),
            pointer(x), x_stride, pointer(y), dtype_of(y_dtype), pieces};
}

// Rows of weights: number, address, kind, shift, address of the scales, their stride: see CodedRows.
using Part = std::tuple<int, Address, CodeKind, int, Address, std::int64_t>;

CodedWeights coded(int in, const std::vector<Part>& parts, std::shared_ptr<Scratch> scratch) {
    CodedWeights weights = {in, {}, std::move(scratch)};
    for (const auto& [rows, codes, kind, shift, scales, stride] : parts)
        weights.parts.push_back({rows, pointer(codes), {kind, shift, floats(scales), stride}});
    return weights;
}

py::list bound_choices(const ProductParams& params, bool in_turn, int most) {
    py::list choices;
    for (const LibraryChoice& choice : library_choices(params, in_turn, most)) {
        choices.append(py::bytes(reinterpret_cast<const char*>(choice.data), sizeof choice.data));
    }
    return choices;
}

bool bound_library(const ProductParams& params, bool in_turn, const std::string& bytes, Address stream) {
    const LibraryChoice choice = choice_of(bytes);
    const py::gil_scoped_release released;
    return library_product(params, in_turn, choice, stream_of(stream));
}

void bound_convolution(const ProductParams& product, const Batch& batch, Address weight, Address bias,
                       const View& state, const View& x, Address rest, int64_t d_inner, int64_t width,
                       Address stream) {
    few_rows_convolution(product, conv_params(batch.ragged, x, weight, bias, state, x, d_inner, width),
                         pointer(rest), stream_of(stream));
}

// The product computes the scan's dt. As dt has no memory, x is passed in its place.
void bound_step(const ProductParams& product, const Batch& batch, const View& x, Address A, const View& B,
                const View& C, Address D, const View& z, Address dt_bias, const View& state, const View& y,
                int64_t d_inner, int64_t d_state, Address stream) {
    few_rows_step(product,
                  scan_params(batch.ragged, x, x, A, B, C, D, z, dt_bias, state, y, d_inner, d_state),
                  stream_of(stream));
}

}  // namespace

void bind_products(py::module_& m) {
    using namespace py::literals;
    m.attr("MOST_FEW_ROWS") = kMostFewRows;
    m.attr("MOST_MIXER_ROWS") = kMostMixerRows;
    py::class_<ProductParams>(m, "Product").def(py::init(&product));
    m.attr("MOST_CODED_ROWS") = kMostCodedRows;
    py::enum_<CodeKind>(m, "CodeKind")
        .value("none", CodeKind::none)
        .value("fp8", CodeKind::fp8)
        .value("int8", CodeKind::int8)
        .value("int4", CodeKind::int4);
    py::class_<Scratch, std::shared_ptr<Scratch>>(m, "Scratch")
        .def(py::init())
        .def("set", [](Scratch& scratch, Address memory) { scratch.memory = pointer(memory); });
    py::class_<CodedWeights, std::shared_ptr<CodedWeights>>(m, "CodedWeights").def(py::init(&coded));
    m.def("takes_coded_product", &takes_coded_product);
    m.def("decode", [](const CodedWeights& weights, Address stream) {
        const py::gil_scoped_release released;
        decode(weights, stream_of(stream));
    });
    m.def("coded_product", [](const CodedWeights& weights, const ProductParams& params, Address stream) {
        const py::gil_scoped_release released;
        coded_product(weights, params, stream_of(stream));
    });
    m.def("library_choices", &bound_choices);
    m.def("library_product", &bound_library);
    m.def("few_rows_convolution", &bound_convolution, ReleaseGil(), "product"_a, py::kw_only(), "batch"_a,
          "weight"_a, "bias"_a, "state"_a, "x"_a, "rest"_a, "d_inner"_a, "width"_a, "stream"_a);
    m.def("few_rows_step", &bound_step, ReleaseGil(), "product"_a, py::kw_only(), "batch"_a, "x"_a, "A"_a,
          "B"_a, "C"_a, "D"_a, "z"_a, "dt_bias"_a, "state"_a, "y"_a, "d_inner"_a, "d_state"_a, "stream"_a);
    m.def("takes_pieces", &takes_pieces);
    m.def("sum_pieces",
          [](Address parts, std::int64_t count, int pieces, Address y, int y_dtype, Address stream) {
              const py::gil_scoped_release released;
              sum_pieces(floats(parts), count, pieces, pointer(y), dtype_of(y_dtype), stream_of(stream));
          });
    m.def("scale_columns", [](Address x, Address factors, std::int64_t rows, std::int64_t columns, Address y,
                              int y_dtype, Address stream) {
        const py::gil_scoped_release released;
        scale_columns(floats(x), floats(factors), rows, columns, pointer(y), dtype_of(y_dtype),
                      stream_of(stream));
    });
    m.def("own_product", [](const ProductParams& params, Address stream) {
        const py::gil_scoped_release released;
        own_product(params, stream_of(stream));
    });
}

}  // namespace cuda
}  // namespace apcbatch
