// Python bindings (pybind11) of apcbatch._CUDA: the recurrent kernels; bindings_*.cpp have the others. All
// addresses are device addresses. The Python side checks shapes and keeps the memory alive until the kernels
// have run.
#include "addresses.h"

namespace {

using namespace apcbatch;
using namespace apcbatch::cuda;

Batch batch(int64_t num_sequences, int64_t num_tokens, int64_t longest, int64_t num_longer,
            Address cu_seqlens, Address initial_slots, Address final_slots, Address snapshot_cu,
            Address snapshot_positions, Address snapshot_slots, Address order, Address present) {
    return {{num_sequences, integers(cu_seqlens), integers(initial_slots), integers(final_slots),
             integers(snapshot_cu), integers(snapshot_positions), integers(snapshot_slots)},
            num_tokens,
            longest,
            integers(order),
            num_longer,
            integers(present)};
}

void conv(const Batch& batch, const View& x, Address weight, Address bias, const View& state, const View& out,
          int64_t d_inner, int64_t width, bool has_silu, Address stream) {
    causal_conv(conv_params(batch.ragged, x, weight, bias, state, out, d_inner, width, has_silu), batch,
                stream_of(stream));
}

void scan(const Batch& batch, const View& x, const View& dt, Address A, const View& B, const View& C,
          Address D, const View& z, Address dt_bias, const View& state, const View& out, int64_t d_inner,
          int64_t d_state, int lanes, Address stream) {
    const ScanParams params =
        scan_params(batch.ragged, x, dt, A, B, C, D, z, dt_bias, state, out, d_inner, d_state);
    selective_scan(params, batch, lanes, stream_of(stream));
}

// Makes a stream of the current device that is never destroyed.
Address new_stream() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a new stream");
    return reinterpret_cast<Address>(stream);
}

}  // namespace

PYBIND11_MODULE(_CUDA, m) {
    using namespace py::literals;
    m.doc() = "apcbatch CUDA kernels over addresses and a stream (private; see apcbatch.kernels.cuda.ops)";
    m.attr("MOST_STATES") = kMostStates;
    m.attr("MOST_TAPS") = kMostTaps;
    m.def("new_stream", &new_stream);
    py::class_<Batch>(m, "Batch").def(py::init(&batch));
    m.def("causal_conv", &conv, ReleaseGil(), py::kw_only(), "batch"_a, "x"_a, "weight"_a, "bias"_a,
          "state"_a, "out"_a, "d_inner"_a, "width"_a, "has_silu"_a, "stream"_a);
    m.def("selective_scan", &scan, ReleaseGil(), py::kw_only(), "batch"_a, "x"_a, "dt"_a, "A"_a, "B"_a, "C"_a,
          "D"_a, "z"_a, "dt_bias"_a, "state"_a, "out"_a, "d_inner"_a, "d_state"_a, "lanes"_a, "stream"_a);
    bind_rows(m);
    bind_experts(m);
    bind_heads(m);
    bind_products(m);
    bind_program(m);
}
