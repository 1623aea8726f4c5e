// Python bindings (pybind11) of apcbatch._CUDA: the experts of a mixture. The Python side checks shapes and
// keeps the memory alive until the kernels have run.
#include <pybind11/stl.h>

#include "addresses.h"
#include "experts.h"

namespace apcbatch {
namespace cuda {
namespace {

void bound_group(int tokens, int per_token, int num_experts, Address chosen, Address present, Address groups,
                 Address stream) {
    group({tokens, per_token, num_experts, integers(chosen), integers(present),
           static_cast<Groups*>(pointer(groups))},
          stream_of(stream));
}

// Returns the maps of experts with weights (out or 2 out, in) at these addresses, concatenated. kind, shift:
// see Coding. scales: addresses, of codes; else 0.
py::bytes bound_maps(const std::vector<std::pair<Address, Address>>& weights_and_scales, CodeKind kind,
                     int shift, std::int64_t out, std::int64_t in, bool gated) {
    std::vector<ExpertMaps> maps;
    for (const auto& [weights, scales] : weights_and_scales) {
        const Coding coding = {kind, shift, floats(scales), gated ? 2 * out : out};
        maps.push_back(expert_maps(pointer(weights), coding, out, in, gated));
    }
    return py::bytes(reinterpret_cast<const char*>(maps.data()), maps.size() * sizeof maps[0]);
}

void bound_expert_product(Address groups, int tokens, int per_token, int experts, int in, int out,
                          Activation activation, CodeKind kind, int shift, Address weights, Address x,
                          Address y, Address scale, Address routing, Address stream) {
    expert_product({static_cast<const Groups*>(pointer(groups)),
                    tokens,
                    per_token,
                    experts,
                    in,
                    out,
                    activation,
                    pointer(weights),
                    pointer(x),
                    pointer(y),
                    floats(scale),
                    floats(routing),
                    {kind, shift}},
                   stream_of(stream));
}

void bound_expert_sum(int tokens, int per_token, int columns, Address present, Address rows, Address y,
                      Address stream) {
    expert_sum(
        {tokens, columns, {floats(rows), per_token, integers(present)}, static_cast<float*>(pointer(y))},
        stream_of(stream));
}

}  // namespace

void bind_experts(py::module_& m) {
    m.attr("MOST_EXPERTS") = kMostExperts;
    m.attr("GROUPS_BYTES") = sizeof(Groups);
    py::enum_<Activation>(m, "Activation")
        .value("none", Activation::none)
        .value("swiglu", Activation::swiglu)
        .value("relu_square", Activation::relu_square);
    m.def("expert_maps", &bound_maps);
    m.def("takes_experts", &takes_experts);
    m.def("group", &bound_group, ReleaseGil());
    m.def("expert_product", &bound_expert_product, ReleaseGil());
    m.def("expert_sum", &bound_expert_sum, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
