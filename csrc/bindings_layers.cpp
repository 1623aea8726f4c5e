// Python's view of the calls that run a whole part of a layer (pybind11). Like bindings.cpp: addresses come
// in, the Python side checks shapes and keeps the arrays alive.
#include "bindings.h"
#include "feed_forward.h"
#include "mixer.h"
#include "parts.h"

namespace {

apcbatch::Projection projection(int64_t out, int64_t in, Address weights, int dtype, Address bias) {
    return {out, in, values(weights, dtype, out), dtype_of(dtype), floats(bias, kMaybe)};
}

apcbatch::MixerParams mixer_params(const apcbatch::PreNorm& norm, int dtype,
                                   const apcbatch::Projection& in_proj, const apcbatch::Projection& x_proj,
                                   const apcbatch::Projection& dt_proj, const apcbatch::Projection& out_proj,
                                   int64_t d_state, int64_t width, Address conv_weight, Address conv_bias,
                                   Address A, Address D, Address dt_bias, bool has_norms, Address dt_norm,
                                   Address B_norm, Address C_norm, float norm_eps, Address ssm,
                                   int64_t ssm_stride, Address conv, int64_t conv_stride) {
    apcbatch::MixerParams p{};
    p.norm = norm;
    p.dtype = dtype_of(dtype);
    p.in_proj = in_proj;
    p.x_proj = x_proj;
    p.dt_proj = dt_proj;
    p.out_proj = out_proj;
    p.d_state = d_state;
    p.width = width;
    p.conv_weight = floats(conv_weight, width);
    p.conv_bias = floats(conv_bias, kMaybe);
    p.A = floats(A, d_state);
    p.D = floats(D, d_state);
    p.dt_bias = floats(dt_bias, d_state);
    p.has_norms = has_norms;
    p.dt_norm = floats(dt_norm, kMaybe);
    p.B_norm = floats(B_norm, kMaybe);
    p.C_norm = floats(C_norm, kMaybe);
    p.norm_eps = norm_eps;
    p.ssm = floats(ssm, kMaybe);
    p.ssm_stride = ssm_stride;
    p.conv = values(conv, dtype, kMaybe);
    p.conv_stride = conv_stride;
    return p;
}

apcbatch::Residual residual(int64_t t, Address sum, Address delta, bool has_delta) {
    return {floats(sum, t), floats(delta, t), has_delta};
}

void run_mixer(const apcbatch::MixerParams& params, const apcbatch::RaggedParams& ragged, Address sum,
               Address delta, bool has_delta, int num_threads) {
    apcbatch::mixer(params, ragged, residual(ragged.num_sequences, sum, delta, has_delta), num_threads);
}

apcbatch::MlpParams mlp_params(int dtype, const apcbatch::Projection& gate_up,
                               const apcbatch::Projection& down) {
    return {dtype_of(dtype), gate_up, down};
}

void run_mlp(const apcbatch::MlpParams& params, const apcbatch::PreNorm& norm, int64_t t, Address sum,
             Address delta, bool has_delta, int num_threads) {
    apcbatch::mlp(params, norm, t, residual(t, sum, delta, has_delta), num_threads);
}

apcbatch::MixtureParams mixture_params(const apcbatch::Projection& router, int64_t experts_per_token,
                                       const py::list& experts) {
    apcbatch::MixtureParams params{router, experts_per_token, {}};
    for (const py::handle expert : experts) params.experts.push_back(expert.cast<apcbatch::MlpParams>());
    return params;
}

void run_mixture(const apcbatch::MixtureParams& params, const apcbatch::PreNorm& norm, int64_t t, Address sum,
                 Address delta, bool has_delta, int num_threads) {
    apcbatch::mixture(params, norm, t, residual(t, sum, delta, has_delta), num_threads);
}

py::list part_seconds() {
    py::list seconds;
    for (int i = 0; i < apcbatch::kParts; ++i) seconds.append(apcbatch::part_seconds()[i]);
    return seconds;
}

}  // namespace

void bind_layers(py::module_& m) {
    py::class_<apcbatch::Projection>(m, "Projection").def(py::init(&projection));
    py::class_<apcbatch::PreNorm>(m, "PreNorm").def(py::init([](Address weight, float eps) {
        return apcbatch::PreNorm{floats(weight, kMaybe), eps};
    }));
    py::class_<apcbatch::MixerParams>(m, "Mixer")
        .def(py::init(&mixer_params))
        .def("run", &run_mixer, ReleaseGil());
    py::class_<apcbatch::MlpParams>(m, "Mlp").def(py::init(&mlp_params)).def("run", &run_mlp, ReleaseGil());
    py::class_<apcbatch::MixtureParams>(m, "Mixture")
        .def(py::init(&mixture_params))
        .def("run", &run_mixture, ReleaseGil());
    m.def("record_parts", &apcbatch::record_parts);
    m.def("part_seconds", &part_seconds);
}
