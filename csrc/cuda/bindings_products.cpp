// apcbatch._CUDA: products of one chain for Python (pybind11). The Python side checks shapes, and keeps alive
// what the addresses point at until the stream has passed.
#include <cstring>

#include "addresses.h"
#include "library.h"

namespace apcbatch {
namespace cuda {
namespace {

// rows, in, out, the type of weight and x, their addresses, the elements of a row of x, y and its type,
// pieces.
ProductParams product(int rows, int in, int out, int dtype, Address weight, Address x, std::int64_t x_stride,
                      Address y, int y_dtype, int pieces) {
    return {rows,       in,       out,        dtype_of(dtype),   pointer(weight),
            pointer(x), x_stride, pointer(y), dtype_of(y_dtype), pieces};
}

py::list bound_choices(const ProductParams& params, int most) {
    py::list choices;
    for (const LibraryChoice& choice : library_choices(params, most)) {
        choices.append(py::bytes(reinterpret_cast<const char*>(choice.data), sizeof choice.data));
    }
    return choices;
}

bool bound_library(const ProductParams& params, const std::string& bytes, Address stream) {
    LibraryChoice choice;
    if (bytes.size() != sizeof choice.data) throw std::invalid_argument("a choice has 64 bytes");
    std::memcpy(choice.data, bytes.data(), sizeof choice.data);
    const py::gil_scoped_release released;
    return library_product(params, choice, stream_of(stream));
}

}  // namespace

void bind_products(py::module_& m) {
    m.attr("MOST_FEW_ROWS") = kMostFewRows;
    m.attr("MOST_PIECES") = kMostPieces;
    py::class_<ProductParams>(m, "Product").def(py::init(&product));
    m.def("library_choices", &bound_choices);
    m.def("library_product", &bound_library);
    m.def("takes_few_rows", &takes_few_rows);
    m.def("few_rows_product", [](const ProductParams& params, Address stream) {
        const py::gil_scoped_release released;
        few_rows_product(params, stream_of(stream));
    });
    m.def("takes_pieces", &takes_pieces);
    m.def("sum_pieces",
          [](Address parts, std::int64_t count, int pieces, Address y, int y_dtype, Address stream) {
              const py::gil_scoped_release released;
              sum_pieces(floats(parts), count, pieces, pointer(y), dtype_of(y_dtype), stream_of(stream));
          });
    m.def("chain_product", [](const ProductParams& params, Address stream) {
        const py::gil_scoped_release released;
        chain_product(params, stream_of(stream));
    });
}

}  // namespace cuda
}  // namespace apcbatch
