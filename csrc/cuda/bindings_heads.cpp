// Python bindings (pybind11) of apcbatch._CUDA: recurrences over heads, and the rows of heads. The Python
// side checks shapes and keeps the memory alive until the kernels have run.
#include "addresses.h"
#include "heads.h"

namespace apcbatch {
namespace cuda {
namespace {

// x, gates, out: see head_scan_over. memory: head_scan_bytes(params, t) bytes.
void bound_head_scan(const HeadScanParams& params, const Batch& batch, const View& x, const View& gates,
                     Address out, Address memory, int own, Address stream) {
    const HeadScanParams p = head_scan_over(params, batch.ragged, values(x, params.dtype, batch.num_tokens),
                                            x.stride, values(gates, params.dtype, batch.num_tokens),
                                            gates.stride, apcbatch::floats(out, batch.num_tokens));
    head_scan(p, batch, own, pointer(memory), stream_of(stream));
}

void bound_gated_norm(int64_t t, int64_t heads, int64_t d, const View& x, const View& gate, Address weight,
                      int64_t weight_stride, float eps, bool gate_first, const View& y, Address stream) {
    gated_norm(gated_norm_params(t, heads, d, x, gate, weight, weight_stride, eps, gate_first, y),
               stream_of(stream));
}

void bound_norm_rope(int64_t t, int64_t heads, int64_t head_dim, const View& x, Address weight, float eps,
                     Address steps, int64_t pairs, Address positions, const View& y, Address stream) {
    norm_rope(norm_rope_params(t, heads, head_dim, x, weight, eps, steps, pairs, positions, y),
              stream_of(stream));
}

void bound_sigmoid_mul(int64_t t, int64_t h, const View& x, const View& gate, const View& y, Address stream) {
    sigmoid_mul(sigmoid_mul_params(t, h, x, gate, y), stream_of(stream));
}

}  // namespace

void bind_heads(py::module_& m) {
    using namespace py::literals;
    py::class_<HeadScanParams>(m, "HeadScanParams", py::module_local())
        .def(py::init(&head_scan_params), py::kw_only(), "dtype"_a, "key_heads"_a, "value_heads"_a,
             "key_dim"_a, "value_dim"_a, "lanes"_a, "A"_a, "dt_bias"_a, "D"_a, "dt_min"_a, "dt_max"_a,
             "state"_a);
    m.def("head_scan_bytes", &head_scan_bytes);
    m.def("head_scan", &bound_head_scan, ReleaseGil(), py::kw_only(), "params"_a, "batch"_a, "x"_a, "gates"_a,
          "out"_a, "memory"_a, "own"_a, "stream"_a);
    m.def("gated_norm", &bound_gated_norm, ReleaseGil());
    m.def("norm_rope", &bound_norm_rope, ReleaseGil());
    m.def("sigmoid_mul", &bound_sigmoid_mul, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
