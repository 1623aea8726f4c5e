// The calls that run a whole part of a layer for Python (pybind11). What stays the same from pass to pass is
// given once, by name.
#include "bindings.h"
#include "feed_forward.h"
#include "mixer.h"
#include "parts.h"

namespace apcbatch {
namespace {

MixerParams mixer_params(const PreNorm& norm, const Projection& in_proj, const Projection& x_proj,
                         const Projection& dt_proj, const Projection& out_proj, std::int64_t d_state,
                         std::int64_t width, Address conv_weight, Address conv_bias, Address A, Address D,
                         Address dt_bias, bool has_norms, Address dt_norm, Address B_norm, Address C_norm,
                         float norm_eps, const View& ssm, const View& conv) {
    MixerParams p;
    p.norm = norm;
    p.dtype = in_proj.dtype;
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
    p.ssm = static_cast<float*>(values(ssm, DType::float32, kMaybe));
    p.ssm_stride = ssm.stride;
    p.conv = values(conv, p.dtype, kMaybe);
    p.conv_stride = conv.stride;
    return p;
}

Residual residual(std::int64_t t, Address sum, Address delta, bool has_delta) {
    return {floats(sum, t), floats(delta, t), has_delta};
}

void run_mixer(const MixerParams& params, const RaggedParams& ragged, Address sum, Address delta,
               bool has_delta, int num_threads) {
    mixer(params, ragged, residual(ragged.num_sequences, sum, delta, has_delta), num_threads);
}

MlpParams mlp_params(const Projection& gate_up, const Projection& down) {
    return {gate_up.dtype, gate_up, down};
}

void run_mlp(const MlpParams& params, const PreNorm& norm, std::int64_t t, Address sum, Address delta,
             bool has_delta, int num_threads) {
    mlp(params, norm, t, residual(t, sum, delta, has_delta), num_threads);
}

MixtureParams mixture_params(const Projection& router, std::int64_t experts_per_token,
                             const py::list& experts) {
    MixtureParams params{router, experts_per_token, {}};
    for (const py::handle expert : experts) params.experts.push_back(expert.cast<MlpParams>());
    return params;
}

void run_mixture(const MixtureParams& params, const PreNorm& norm, std::int64_t t, Address sum, Address delta,
                 bool has_delta, int num_threads) {
    mixture(params, norm, t, residual(t, sum, delta, has_delta), num_threads);
}

py::list bound_part_seconds() {
    py::list seconds;
    for (int i = 0; i < kParts; ++i) seconds.append(part_seconds()[i]);
    return seconds;
}

}  // namespace
}  // namespace apcbatch

void bind_layers(py::module_& m) {
    using namespace apcbatch;
    using namespace py::literals;
    py::class_<PreNorm>(m, "PreNorm").def(py::init([](Address weight, float eps) {
        return PreNorm{floats(weight, kMaybe), eps};
    }));
    py::class_<MixerParams>(m, "Mixer")
        .def(py::init(&mixer_params), py::kw_only(), "norm"_a, "in_proj"_a, "x_proj"_a, "dt_proj"_a,
             "out_proj"_a, "d_state"_a, "width"_a, "conv_weight"_a, "conv_bias"_a, "A"_a, "D"_a, "dt_bias"_a,
             "has_norms"_a, "dt_norm"_a, "B_norm"_a, "C_norm"_a, "norm_eps"_a, "ssm"_a, "conv"_a)
        .def("run", &run_mixer, ReleaseGil());
    py::class_<MlpParams>(m, "Mlp").def(py::init(&mlp_params)).def("run", &run_mlp, ReleaseGil());
    py::class_<MixtureParams>(m, "Mixture")
        .def(py::init(&mixture_params))
        .def("run", &run_mixture, ReleaseGil());
    m.def("record_parts", &record_parts);
    m.def("part_seconds", &bound_part_seconds);
}
