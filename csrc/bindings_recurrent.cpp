// Python bindings (pybind11) of the recurrent kernels.
#include "bindings.h"
#include "scan.h"

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

void bound_causal_conv(const RaggedParams& ragged, const View& x, const View& weight, Address bias,
                       const View& state, const View& out, std::int64_t d_inner, std::int64_t width,
                       int num_threads) {
    causal_conv(conv_params(ragged, x, weight, bias, state, out, d_inner, width), num_threads);
}

void bound_selective_scan(const RaggedParams& ragged, const View& x, const View& dt, Address A, const View& B,
                          const View& C, Address D, const View& z, Address dt_bias, const View& state,
                          const View& out, std::int64_t d_inner, std::int64_t d_state, int num_threads) {
    selective_scan(scan_params(ragged, x, dt, A, B, C, D, z, dt_bias, state, out, d_inner, d_state),
                   num_threads);
}

void bound_elementwise(int function, Address from, Address to, std::int64_t count) {
    if (function < 0 || function > int(Elementwise::silu)) {
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
    m.def("causal_conv", &apcbatch::bound_causal_conv, ReleaseGil(), py::kw_only(), "ragged"_a, "x"_a,
          "weight"_a, "bias"_a, "state"_a, "out"_a, "d_inner"_a, "width"_a, "num_threads"_a);
    m.def("selective_scan", &apcbatch::bound_selective_scan, ReleaseGil(), py::kw_only(), "ragged"_a, "x"_a,
          "dt"_a, "A"_a, "B"_a, "C"_a, "D"_a, "z"_a, "dt_bias"_a, "state"_a, "out"_a, "d_inner"_a,
          "d_state"_a, "num_threads"_a);
    m.def("elementwise", &apcbatch::bound_elementwise, ReleaseGil());
}
