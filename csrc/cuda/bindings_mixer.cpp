// Python bindings (pybind11) of apcbatch._CUDA: all Mamba mixers in one call. The Python side checks shapes
// and keeps the memory alive until the kernels have run.
#include <pybind11/stl.h>

#include "addresses.h"
#include "mixer.h"

namespace apcbatch {
namespace cuda {
namespace {

using Weights = std::tuple<Address, int, int, int>;           // address, out, in, pieces
using Kernels = std::array<std::pair<std::string, bool>, 4>;  // cuBLASLt kernel or "", in_turn
using Norm = std::pair<Address, float>;                       // address of the weight or 0, eps

ChainWeights weights_of(const Weights& weights) {
    const auto [address, out, in, pieces] = weights;
    return {pointer(address), out, in, pieces};
}

ChainKernel kernel_of(const std::pair<std::string, bool>& kernel) {
    const bool of_library = !kernel.first.empty();
    return {of_library, kernel.second, of_library ? choice_of(kernel.first) : LibraryChoice{}};
}

MixerKernels kernels_of(const Kernels& kernels) {
    return {kernel_of(kernels[0]), kernel_of(kernels[1]), kernel_of(kernels[2]), kernel_of(kernels[3])};
}

NormParams norm_of(const Norm& norm) {
    NormParams params;
    params.weight = floats(norm.first);
    params.eps = norm.second;
    return params;
}

Mixer mixer(int dtype, const Weights& in_proj, const Weights& x_proj, const Weights& dt_proj,
            const Weights& out_proj, const Norm& norm, const std::optional<std::array<Norm, 3>>& inner_norms,
            const View& conv_weight, Address conv_bias, const View& conv_state, Address A, Address D,
            Address dt_bias, const View& ssm_state, int64_t d_inner, int64_t d_state, int64_t width) {
    const View none = {0, 0, dtype_of(dtype)};
    Mixer made = {};
    made.dtype = dtype_of(dtype);
    made.in_proj = weights_of(in_proj);
    made.x_proj = weights_of(x_proj);
    made.dt_proj = weights_of(dt_proj);
    made.out_proj = weights_of(out_proj);
    made.norm = norm_of(norm);
    made.has_inner_norms = inner_norms.has_value();
    if (inner_norms) {
        made.dt_norm = norm_of((*inner_norms)[0]);
        made.B_norm = norm_of((*inner_norms)[1]);
        made.C_norm = norm_of((*inner_norms)[2]);
    }
    made.convolution = conv_params({}, none, conv_weight, conv_bias, conv_state, none, d_inner, width);
    made.scan =
        scan_params({}, none, none, A, none, none, D, none, dt_bias, ssm_state, none, d_inner, d_state);
    return made;
}

void run(const std::vector<const Mixer*>& mixers, const Batch& batch, Address sum, Address delta,
         Address left, Address workspace, const Kernels& kernels, Address stream) {
    run_mixers(mixers,
               {batch, static_cast<float*>(pointer(sum)), floats(delta), static_cast<float*>(pointer(left)),
                pointer(workspace), kernels_of(kernels)},
               stream_of(stream));
}

}  // namespace

void bind_mixer(py::module_& m) {
    using namespace py::literals;
    py::class_<Mixer>(m, "Mixer")
        .def(py::init(&mixer), py::kw_only(), "dtype"_a, "in_proj"_a, "x_proj"_a, "dt_proj"_a, "out_proj"_a,
             "norm"_a, "inner_norms"_a, "conv_weight"_a, "conv_bias"_a, "conv_state"_a, "A"_a, "D"_a,
             "dt_bias"_a, "ssm_state"_a, "d_inner"_a, "d_state"_a, "width"_a);
    m.def("workspace_bytes", [](const Mixer& mixer, int64_t tokens, const Kernels& kernels) {
        return workspace_bytes(mixer, tokens, kernels_of(kernels));
    });
    m.def("run_mixers", &run, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
