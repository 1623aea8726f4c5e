// Python bindings (pybind11) of the fused sub-blocks, one class per kind. Constructors take what is constant
// over all passes, by keyword.
#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "attention_mixer.h"
#include "bindings.h"
#include "feed_forward.h"
#include "head_mixer.h"
#include "mamba_mixer.h"
#include "parts.h"
#include "scratch.h"
#include "short_conv.h"

namespace apcbatch {
namespace {

// Returns the arguments of convolve. weight: (channels, width). bias: (channels) or null.
ConvParams mixer_conv(DType dtype, std::int64_t channels, std::int64_t width, Address weight, Address bias,
                      const View& state) {
    const View none = {0, 0, dtype};
    return conv_params({}, none, weight, bias, state, none, channels, width);
}

MambaMixer mamba_mixer(const PreNorm& norm, const Projection& in_proj, const Projection& x_proj,
                       const Projection& dt_proj, const Projection& out_proj, std::int64_t d_state,
                       std::int64_t width, Address conv_weight, Address conv_bias, Address A, Address D,
                       Address dt_bias, bool has_norms, Address dt_norm, Address B_norm, Address C_norm,
                       float norm_eps, const View& ssm, const View& conv) {
    MambaMixer p;
    p.norm = norm;
    p.in_proj = in_proj;
    p.x_proj = x_proj;
    p.dt_proj = dt_proj;
    p.out_proj = out_proj;
    p.conv = mixer_conv(in_proj.dtype, dt_proj.out, width, conv_weight, conv_bias, conv);
    p.scan.dtype = in_proj.dtype;
    p.scan.d_inner = dt_proj.out;
    p.scan.d_state = d_state;
    p.scan.A = floats(A, d_state);
    p.scan.D = floats(D, d_state);
    p.scan.dt_bias = floats(dt_bias, d_state);
    p.scan.state = static_cast<float*>(values(ssm, DType::float32, kMaybe));
    p.scan.state_stride = ssm.stride;
    p.has_norms = has_norms;
    p.dt_norm = floats(dt_norm, kMaybe);
    p.B_norm = floats(B_norm, kMaybe);
    p.C_norm = floats(C_norm, kMaybe);
    p.norm_eps = norm_eps;
    return p;
}

HeadMixer head_mixer(const PreNorm& norm, const HeadScanParams& scan, const Projection& in_proj,
                     const Projection& out_proj, std::int64_t width, Address conv_weight, Address conv_bias,
                     Address head_norm, float head_norm_eps, bool gate_first, const View& conv) {
    HeadMixer p;
    p.norm = norm;
    p.scan = scan;
    p.in_proj = in_proj;
    p.out_proj = out_proj;
    p.conv = mixer_conv(scan.dtype, 2 * p.keys() + p.values(), width, conv_weight, conv_bias, conv);
    p.head_norm = floats(head_norm, kMaybe);
    p.head_norm_eps = head_norm_eps;
    p.gate_first = gate_first;
    return p;
}

ShortConv short_conv(const PreNorm& norm, const Projection& in_proj, const Projection& out_proj,
                     std::int64_t width, Address conv_weight, const View& conv) {
    ShortConv p;
    p.norm = norm;
    p.in_proj = in_proj;
    p.out_proj = out_proj;
    p.conv = mixer_conv(in_proj.dtype, in_proj.in, width, conv_weight, 0, conv);
    p.conv.has_silu = false;
    return p;
}

// Runs a sub-block alone. ragged: null for a sub-block without slots.
void run_sub_block(const SubBlock& sub_block, std::int64_t t, const RaggedParams* ragged, Address sum,
                   Address delta, bool has_delta, int num_threads) {
    SubBlockInputs inputs;
    inputs.t = t;
    if (ragged != nullptr) inputs.ragged = *ragged;
    char* memory = thread_workspace(sub_block.scratch_bytes(t));
    sub_block.run(inputs, {floats(sum, t), floats(delta, t), has_delta}, memory, num_threads);
}

AttentionMixer attention_mixer(const PreNorm& norm, const Projection& qkv_proj, const Projection& o_proj,
                               std::int64_t heads, std::int64_t kv_heads, std::int64_t head_dim, float scale,
                               Address q_norm, Address k_norm, float norm_eps, Address steps,
                               std::int64_t pairs, bool is_gated, const View& k_cache, const View& v_cache) {
    AttentionMixer p;
    p.norm = norm;
    p.dtype = qkv_proj.dtype;
    p.qkv_proj = qkv_proj;
    p.o_proj = o_proj;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.scale = scale;
    p.norms = {floats(q_norm, kMaybe), floats(k_norm, kMaybe), norm_eps, integers(steps, pairs), pairs};
    p.is_gated = is_gated;
    p.k_cache = values(k_cache, kMaybe);
    p.v_cache = values(v_cache, k_cache.dtype, kMaybe);
    p.cache_dtype = k_cache.dtype;
    return p;
}

ExpertParams expert(const Projection& gate_up, const Projection& down, bool is_gated) {
    return {gate_up.dtype, gate_up, down, is_gated};
}

// gate: null for none.
Mlp mlp(const PreNorm& norm, const ExpertParams& expert, const Projection* gate) {
    Mlp p;
    p.norm = norm;
    p.expert = expert;
    if (gate != nullptr) p.gate = *gate;
    return p;
}

// latent: latent_in and latent_out, or empty.
Mixture mixture(const PreNorm& norm, const Projection& router, std::int64_t experts_per_token,
                const RoutingRule& rule, const py::tuple& latent, const py::list& experts) {
    Mixture p;
    p.norm = norm;
    p.router = router;
    p.rule = routing_params(0, router.out, experts_per_token, {0, router.out}, rule, 0, 0);
    if (!latent.empty()) {
        p.latent_in = latent[0].cast<Projection>();
        p.latent_out = latent[1].cast<Projection>();
    }
    for (const py::handle one : experts) p.experts.push_back(one.cast<ExpertParams>());
    return p;
}

}  // namespace
}  // namespace apcbatch

void bind_layers(py::module_& m) {
    using namespace apcbatch;
    using namespace py::literals;
    py::class_<PreNorm>(m, "PreNorm").def(py::init([](Address weight, float eps) {
        return PreNorm{floats(weight, kMaybe), eps};
    }));
    py::class_<SubBlock, std::shared_ptr<SubBlock>>(m, "SubBlock");
    py::class_<MambaMixer, SubBlock, std::shared_ptr<MambaMixer>>(m, "MambaMixer")
        .def(py::init(&mamba_mixer), py::kw_only(), "norm"_a, "in_proj"_a, "x_proj"_a, "dt_proj"_a,
             "out_proj"_a, "d_state"_a, "width"_a, "conv_weight"_a, "conv_bias"_a, "A"_a, "D"_a, "dt_bias"_a,
             "has_norms"_a, "dt_norm"_a, "B_norm"_a, "C_norm"_a, "norm_eps"_a, "ssm"_a, "conv"_a)
        .def("run", &run_sub_block, ReleaseGil());
    py::class_<HeadMixer, SubBlock, std::shared_ptr<HeadMixer>>(m, "HeadMixer")
        .def(py::init(&head_mixer), py::kw_only(), "norm"_a, "scan"_a, "in_proj"_a, "out_proj"_a, "width"_a,
             "conv_weight"_a, "conv_bias"_a, "head_norm"_a, "head_norm_eps"_a, "gate_first"_a, "conv"_a)
        .def("run", &run_sub_block, ReleaseGil());
    py::class_<ShortConv, SubBlock, std::shared_ptr<ShortConv>>(m, "ShortConv")
        .def(py::init(&short_conv), py::kw_only(), "norm"_a, "in_proj"_a, "out_proj"_a, "width"_a,
             "conv_weight"_a, "conv"_a)
        .def("run", &run_sub_block, ReleaseGil());
    py::class_<AttentionMixer, SubBlock, std::shared_ptr<AttentionMixer>>(m, "AttentionMixer")
        .def(py::init(&attention_mixer), py::kw_only(), "norm"_a, "qkv_proj"_a, "o_proj"_a, "heads"_a,
             "kv_heads"_a, "head_dim"_a, "scale"_a, "q_norm"_a, "k_norm"_a, "norm_eps"_a, "steps"_a,
             "pairs"_a, "is_gated"_a, "k_cache"_a, "v_cache"_a);
    py::class_<ExpertParams>(m, "Expert").def(py::init(&expert));
    py::class_<Mlp, SubBlock, std::shared_ptr<Mlp>>(m, "Mlp")
        .def(py::init(&mlp))
        .def("run", &run_sub_block, ReleaseGil());
    py::class_<Mixture, SubBlock, std::shared_ptr<Mixture>>(m, "Mixture")
        .def(py::init(&mixture), py::kw_only(), "norm"_a, "router"_a, "experts_per_token"_a, "rule"_a,
             "latent"_a, "experts"_a)
        .def("run", &run_sub_block, ReleaseGil());
    m.def("record_parts", &record_parts);
    m.def("part_seconds", [] { return std::vector(part_seconds(), part_seconds() + kParts); });
}
