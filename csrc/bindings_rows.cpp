// Python bindings (pybind11) of the row-wise ops: norms, gated product, squared ReLU, choice of experts,
// argmax and log-probabilities.
#include "bindings.h"
#include "rowwise.h"

namespace apcbatch {
namespace {

// gate, up, y: (t, f), of one type.
SiluMulParams silu_mul_params(std::int64_t t, std::int64_t f, const View& gate, const View& up,
                              const View& y) {
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
    return p;
}

// x, y: (t, f), of one type.
ReluSquareParams relu_square_params(std::int64_t t, std::int64_t f, const View& x, const View& y) {
    return {t, f, values(x, t * f), x.stride, values(y, x.dtype, t * f), y.stride, x.dtype};
}

// logits: (t, n) float32. tokens: (t), written if `choose`, else read. logprobs: (t) or none.
LogprobParams logprob_params(std::int64_t t, std::int64_t n, const View& logits, bool choose, Address tokens,
                             Address logprobs) {
    LogprobParams p;
    p.t = t;
    p.n = n;
    p.logits = static_cast<float*>(values(logits, DType::float32, t));
    p.stride = logits.stride;
    p.choose = choose;
    p.tokens = integers(tokens, t);
    p.logprobs = floats(logprobs, kMaybe);
    return p;
}

}  // namespace
}  // namespace apcbatch

void bind_rows(py::module_& m) {
    using namespace apcbatch;
    m.def("rms_norm", bound(&rms_norm, &norm_params), ReleaseGil());
    m.def("gated_norm", bound(&gated_norm, &gated_norm_params), ReleaseGil());
    m.def("silu_mul", bound(&silu_mul, &silu_mul_params), ReleaseGil());
    m.def("relu_square", bound(&relu_square, &relu_square_params), ReleaseGil());
    m.def("route", bound(&route, &routing_params), ReleaseGil());
    m.def("logprob", bound(&logprob, &logprob_params), ReleaseGil());
}
