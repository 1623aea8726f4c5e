// Python bindings (pybind11) of the recurrent kernels.
#include "bindings.h"
#include "head_scan.h"
#include "scan.h"
#include "scratch.h"

namespace apcbatch {
namespace {

RaggedParams ragged_params(std::int64_t num_sequences, Address cu_seqlens, Address initial_slots,
                           Address final_slots, Address snapshot_cu, Address snapshot_positions,
                           Address snapshot_slots) {
    const std::int64_t b = num_sequences;
    return {b,
            integers(cu_seqlens, 1),
            integers(initial_slots, b),
            integers(final_slots, b),
            integers(snapshot_cu, 1),
            integers(snapshot_positions, kMaybe),
            integers(snapshot_slots, kMaybe)};
}

// x, gates, out: see head_scan_over.
void bound_head_scan(const HeadScanParams& params, const RaggedParams& ragged, const View& x,
                     const View& gates, Address out, int num_threads) {
    const std::int64_t tokens = ragged.cu_seqlens[ragged.num_sequences];
    const HeadScanParams p =
        head_scan_over(params, ragged, values(x, params.dtype, tokens), x.stride,
                       values(gates, params.dtype, tokens), gates.stride, floats(out, tokens));
    head_scan(p, reinterpret_cast<float*>(thread_workspace(4 * head_scan_floats(p, tokens))), num_threads);
}

void bound_elementwise(int function, Address from, Address to, std::int64_t count) {
    if (function < 0 || function > int(Elementwise::sigmoid)) {
        throw std::invalid_argument("there is no elementwise function " + std::to_string(function));
    }
    elementwise(Elementwise(function), floats(from, count), floats(to, count), count);
}

}  // namespace
}  // namespace apcbatch

void bind_recurrent(py::module_& m) {
    using namespace py::literals;
    // Holds addresses only: the caller keeps the arrays alive.
    py::class_<apcbatch::RaggedParams>(m, "RaggedParams").def(py::init(&apcbatch::ragged_params));
    m.def("causal_conv", bound(&apcbatch::causal_conv, &apcbatch::conv_params), ReleaseGil(), py::kw_only(),
          "ragged"_a, "x"_a, "weight"_a, "bias"_a, "state"_a, "out"_a, "d_inner"_a, "width"_a, "has_silu"_a,
          "num_threads"_a);
    m.def("selective_scan", bound(&apcbatch::selective_scan, &apcbatch::scan_params), ReleaseGil(),
          py::kw_only(), "ragged"_a, "x"_a, "dt"_a, "A"_a, "B"_a, "C"_a, "D"_a, "z"_a, "dt_bias"_a, "state"_a,
          "out"_a, "d_inner"_a, "d_state"_a, "num_threads"_a);
    py::class_<apcbatch::HeadScanParams>(m, "HeadScanParams")
        .def(py::init(&apcbatch::head_scan_params), py::kw_only(), "dtype"_a, "key_heads"_a, "value_heads"_a,
             "key_dim"_a, "value_dim"_a, "lanes"_a, "A"_a, "dt_bias"_a, "D"_a, "dt_min"_a, "dt_max"_a,
             "state"_a);
    m.def("head_scan", &apcbatch::bound_head_scan, ReleaseGil(), py::kw_only(), "params"_a, "ragged"_a, "x"_a,
          "gates"_a, "out"_a, "num_threads"_a);
    m.def("elementwise", &apcbatch::bound_elementwise, ReleaseGil());
}
