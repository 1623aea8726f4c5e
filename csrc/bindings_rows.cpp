// Python bindings (pybind11) of the row-wise ops: norms, gated product, squared ReLU, choice of experts,
// argmax and log-probabilities.
#include "bindings.h"
#include "rowwise.h"

namespace apcbatch {
namespace {

void bound_rms_norm(std::int64_t t, std::int64_t h, const View& x, const View& delta, Address weight,
                    float eps, const View& y, int num_threads) {
    rms_norm(norm_params(t, h, x, delta, weight, eps, y), num_threads);
}

void bound_gated_norm(std::int64_t t, std::int64_t heads, std::int64_t d, const View& x, const View& gate,
                      Address weight, std::int64_t weight_stride, float eps, bool gate_first, const View& y,
                      int num_threads) {
    gated_norm(gated_norm_params(t, heads, d, x, gate, weight, weight_stride, eps, gate_first, y),
               num_threads);
}

// gate, up, y: (t, f), of one type.
void bound_silu_mul(std::int64_t t, std::int64_t f, const View& gate, const View& up, const View& y,
                    int num_threads) {
    SiluMulParams p;
    p.t = t;
    p.f = f;
    p.gate = values(gate, t * f);
    p.gate_stride = gate.stride;
    p.up = values(up, gate.dtype, t * f);
    p.up_stride = up.stride;
    p.y = values(y, gate.dtype, t * f);
    p.y_stride = y.stride;
    p.dtype = gate.dtype;
    silu_mul(p, num_threads);
}

// x, y: (t, f), of one type.
void bound_relu_square(std::int64_t t, std::int64_t f, const View& x, const View& y, int num_threads) {
    relu_square({t, f, values(x, t * f), x.stride, values(y, x.dtype, t * f), y.stride, x.dtype},
                num_threads);
}

void bound_route(std::int64_t t, std::int64_t n, std::int64_t k, const View& logits, const RoutingRule& rule,
                 Address weights, Address indices, int num_threads) {
    route(routing_params(t, n, k, logits, rule, weights, indices), num_threads);
}

// logits: (t, n) float32. tokens: (t), written if `choose`, else read. logprobs: (t) or none.
void bound_logprob(std::int64_t t, std::int64_t n, const View& logits, bool choose, Address tokens,
                   Address logprobs, int num_threads) {
    LogprobParams p;
    p.t = t;
    p.n = n;
    p.logits = static_cast<float*>(values(logits, DType::float32, t));
    p.stride = logits.stride;
    p.choose = choose;
    p.tokens = integers(tokens, t);
    p.logprobs = floats(logprobs, kMaybe);
    logprob(p, num_threads);
}

}  // namespace
}  // namespace apcbatch

void bind_rows(py::module_& m) {
    m.def("rms_norm", &apcbatch::bound_rms_norm, ReleaseGil());
    m.def("gated_norm", &apcbatch::bound_gated_norm, ReleaseGil());
    m.def("silu_mul", &apcbatch::bound_silu_mul, ReleaseGil());
    m.def("relu_square", &apcbatch::bound_relu_square, ReleaseGil());
    m.def("route", &apcbatch::bound_route, ReleaseGil());
    m.def("logprob", &apcbatch::bound_logprob, ReleaseGil());
}
