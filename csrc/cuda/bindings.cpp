// apcbatch._CUDA: the recurrent kernels for Python (pybind11); bindings_*.cpp have the others. Every
// address is one of the device's; the Python side checks shapes, and keeps alive what the addresses point at
// until the stream has passed.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "addresses.h"

namespace {

using namespace apcbatch::cuda;

Batch batch(int64_t num_sequences, int64_t num_tokens, int64_t longest, int64_t num_longer,
            Address cu_seqlens, Address initial_slots, Address final_slots, Address snapshot_cu,
            Address snapshot_positions, Address snapshot_slots, Address order) {
    return {{num_sequences, integers(cu_seqlens), integers(initial_slots), integers(final_slots),
             integers(snapshot_cu), integers(snapshot_positions), integers(snapshot_slots)},
            num_tokens,
            longest,
            {integers(order), num_longer},
            {integers(order) + num_longer, num_sequences - num_longer}};
}

void conv(const Batch& batch, int dtype, int64_t d_inner, int64_t width, Address x, int64_t x_stride,
          Address weight, Address bias, int weight_dtype, Address state, int64_t state_stride, Address out,
          Address stream) {
    apcbatch::ConvParams params{};
    params.ragged = batch.ragged;
    params.dtype = apcbatch::DType(dtype);
    params.d_inner = d_inner;
    params.width = width;
    params.x = pointer(x);
    params.x_stride = x_stride;
    params.weight = pointer(weight);
    params.bias = pointer(bias);
    params.weight_dtype = apcbatch::DType(weight_dtype);
    params.state = pointer(state);
    params.state_stride = state_stride;
    params.out = pointer(out);
    params.out_stride = d_inner;
    causal_conv(params, batch.num_tokens, batch.longest, stream_of(stream));
}

void scan(const Batch& batch, int dtype, int64_t d_inner, int64_t d_state, Address x, int64_t x_stride,
          Address dt, int64_t dt_stride, Address A, Address B, int64_t B_stride, Address C, int64_t C_stride,
          Address D, Address z, int64_t z_stride, Address dt_bias, Address state, int64_t state_stride,
          Address out, int lanes, Address stream) {
    apcbatch::ScanParams params{};
    params.ragged = batch.ragged;
    params.dtype = apcbatch::DType(dtype);
    params.d_inner = d_inner;
    params.d_state = d_state;
    params.x = pointer(x);
    params.x_stride = x_stride;
    params.dt = pointer(dt);
    params.dt_stride = dt_stride;
    params.A = floats(A);
    params.B = pointer(B);
    params.B_stride = B_stride;
    params.C = pointer(C);
    params.C_stride = C_stride;
    params.D = floats(D);
    params.z = pointer(z);
    params.z_stride = z_stride;
    params.dt_bias = floats(dt_bias);
    params.state = static_cast<float*>(pointer(state));
    params.state_stride = state_stride;
    params.out = pointer(out);
    params.out_stride = d_inner;
    selective_scan(params, batch.longer, lanes, stream_of(stream));
    selective_step(params, batch.single, stream_of(stream));
}

}  // namespace

PYBIND11_MODULE(_CUDA, m) {
    m.doc() = "apcbatch CUDA kernels over addresses and a stream (private; see apcbatch.kernels.cuda.scan)";
    m.attr("MOST_STATES") = kMostStates;
    m.attr("MOST_TAPS") = kMostTaps;
    py::class_<Batch>(m, "Batch").def(py::init(&batch));
    m.def("causal_conv", &conv, ReleaseGil());
    m.def("selective_scan", &scan, ReleaseGil());
    bind_rows(m);
    bind_decode(m);
    bind_experts(m);
}
