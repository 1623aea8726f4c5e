// Python bindings (pybind11) of apcbatch._CUDA: recurrences over heads, and the rows of heads. The Python
// side checks shapes and keeps the memory alive until the kernels have run.
#include "addresses.h"
#include "heads.h"

namespace apcbatch {
namespace cuda {
namespace {

// A, dt_bias: (value_heads). D: (value_heads), for the rule ssd, which also has the limits of dt; null for
// delta. state: (slots, value_heads, value_dim / lanes, key_dim, lanes) float32.
HeadScanParams scan_params(int dtype, int64_t key_heads, int64_t value_heads, int64_t key_dim,
                           int64_t value_dim, int64_t lanes, Address A, Address dt_bias, Address D,
                           float dt_min, float dt_max, const View& state) {
    HeadScanParams p;
    p.rule = D == 0 ? HeadRule::delta : HeadRule::ssd;
    p.dtype = dtype_of(dtype);
    p.key_heads = key_heads;
    p.value_heads = value_heads;
    p.key_dim = key_dim;
    p.value_dim = value_dim;
    p.lanes = lanes;
    p.A = apcbatch::floats(A, value_heads);
    p.dt_bias = apcbatch::floats(dt_bias, value_heads);
    p.D = apcbatch::floats(D, kMaybe);
    p.dt_min = dt_min;
    p.dt_max = dt_max;
    p.state = static_cast<float*>(values(state, DType::float32, kMaybe));
    p.state_stride = state.stride;
    return p;
}

// x: (t, 2 key_heads key_dim + value_heads value_dim), columns of q, k and v. gates: columns of b and a, of
// ssd of a alone, (t, value_heads) each. memory: bytes_of_scan(params, t) bytes. out: (t, value_heads
// value_dim) float32 contiguous.
void bound_head_scan(HeadScanParams p, const Batch& batch, const View& x, const View& gates, Address memory,
                     Address out, Address stream) {
    const int64_t size = bytes_of(p.dtype), keys = p.key_heads * p.key_dim;
    const char* columns = static_cast<const char*>(values(x, p.dtype, batch.num_tokens));
    const char* gate = static_cast<const char*>(values(gates, p.dtype, batch.num_tokens));
    p.ragged = batch.ragged;
    p.q = columns;
    p.k = columns + keys * size;
    p.v = columns + 2 * keys * size;
    p.q_stride = p.k_stride = p.v_stride = x.stride;
    p.b = gate;
    p.a = p.rule == HeadRule::delta ? gate + p.value_heads * size : gate;
    p.b_stride = p.a_stride = gates.stride;
    p.out = static_cast<float*>(pointer(out));
    p.out_stride = p.value_heads * p.value_dim;
    p.out_head_stride = p.value_dim;
    head_scan(p, batch, pointer(memory), stream_of(stream));
}

// x: (t, heads d) float32 contiguous. gate, y: (t, heads d), y contiguous, of gate's type. weight: (d), or
// (heads d) with gate_first.
void bound_gated_norm(int64_t t, int64_t heads, int64_t d, Address x, const View& gate, Address weight,
                      int64_t weight_stride, float eps, bool gate_first, const View& y, Address stream) {
    GatedNormParams p;
    p.t = t;
    p.heads = heads;
    p.d = d;
    p.gate_first = gate_first;
    p.x = apcbatch::floats(x, t);
    p.x_stride = heads * d;
    p.x_head_stride = d;
    p.gate = values(gate, t);
    p.gate_stride = gate.stride;
    p.weight = apcbatch::floats(weight, kMaybe);
    p.weight_stride = weight_stride;
    p.eps = eps;
    p.y = values(y, gate.dtype, t);
    p.dtype = gate.dtype;
    gated_norm(p, stream_of(stream));
}

// x, y: (t, heads, head_dim), of one type. weight: (head_dim). steps: (pairs). positions: (t).
void bound_norm_rope(int64_t t, int64_t heads, int64_t head_dim, const View& x, Address weight, float eps,
                     Address steps, int64_t pairs, Address positions, const View& y, Address stream) {
    NormRopeParams p;
    p.t = t;
    p.heads = heads;
    p.head_dim = head_dim;
    p.x = values(x, t * heads * head_dim);
    p.x_stride = x.stride;
    p.weight = apcbatch::floats(weight, kMaybe);
    p.eps = eps;
    p.steps = apcbatch::integers(steps, pairs);
    p.pairs = pairs;
    p.positions = apcbatch::integers(positions, t);
    p.y = values(y, x.dtype, t * heads * head_dim);
    p.y_stride = y.stride;
    p.dtype = x.dtype;
    norm_rope(p, stream_of(stream));
}

// x, gate, y: (t, h), of one type.
void bound_sigmoid_mul(int64_t t, int64_t h, const View& x, const View& gate, const View& y, Address stream) {
    SigmoidMulParams p;
    p.t = t;
    p.h = h;
    p.x = values(x, t * h);
    p.x_stride = x.stride;
    p.gate = values(gate, x.dtype, t * h);
    p.gate_stride = gate.stride;
    p.y = values(y, x.dtype, t * h);
    p.y_stride = y.stride;
    p.dtype = x.dtype;
    sigmoid_mul(p, stream_of(stream));
}

}  // namespace

void bind_heads(py::module_& m) {
    using namespace py::literals;
    py::class_<HeadScanParams>(m, "HeadScanParams", py::module_local())
        .def(py::init(&scan_params), py::kw_only(), "dtype"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a,
             "value_dim"_a, "lanes"_a, "A"_a, "dt_bias"_a, "D"_a, "dt_min"_a, "dt_max"_a, "state"_a);
    m.def("head_scan_bytes", &head_scan_bytes);
    m.def("head_scan", &bound_head_scan, ReleaseGil());
    m.def("gated_norm", &bound_gated_norm, ReleaseGil());
    m.def("norm_rope", &bound_norm_rope, ReleaseGil());
    m.def("sigmoid_mul", &bound_sigmoid_mul, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
