// Python bindings (pybind11) of apcbatch._CUDA: consecutive sub-blocks in one call. The Python side checks
// shapes and keeps the memory alive until the kernels have run.
#include <pybind11/stl.h>

#include "addresses.h"
#include "program.h"

namespace apcbatch {
namespace cuda {
namespace {

// address, out, in, pieces; encoded weights or None
using Weights = std::tuple<Address, int, int, int, std::shared_ptr<CodedWeights>>;
using Kernels = std::vector<std::pair<std::string, bool>>;  // cuBLASLt kernel or "", in_turn
using Norm = std::tuple<Address, float, int64_t>;           // address of the weight or 0, eps, columns
using Lists = std::array<Address, 4>;                       // page_table, context, token_slots, positions
const View kNone = {};

ChainWeights weights_of(const Weights& weights) {
    const auto& [address, out, in, pieces, coded] = weights;
    return {pointer(address), out, in, pieces, coded};
}

std::vector<ChainKernel> kernels_of(const Kernels& kernels) {
    std::vector<ChainKernel> all;
    for (const auto& [kernel, in_turn] : kernels) {
        all.push_back({!kernel.empty(), in_turn, kernel.empty() ? LibraryChoice{} : choice_of(kernel)});
    }
    return all;
}

SumNormParams norm_of(const Norm& norm) {
    SumNormParams params;
    params.weight = floats(std::get<0>(norm));
    params.eps = std::get<1>(norm);
    params.h = std::get<2>(norm);
    return params;
}

std::vector<SumNormParams> norms_of(const std::vector<Norm>& norms) {
    std::vector<SumNormParams> all;
    for (const Norm& norm : norms) all.push_back(norm_of(norm));
    return all;
}

void run(const Program& program, const Batch& batch, Address sum, Address delta,
         const PendingAddresses& pending, Address left, Address workspace, const Kernels& kernels,
         const Lists& lists, int64_t pages, Address stream) {
    const ProgramPass pass = {batch,
                              static_cast<float*>(pointer(sum)),
                              floats(delta),
                              pending_of(pending),
                              static_cast<float*>(pointer(left)),
                              pointer(workspace),
                              kernels_of(kernels),
                              integers(lists[0]),
                              integers(lists[1]),
                              integers(lists[2]),
                              integers(lists[3]),
                              pages};
    program.run(pass, stream_of(stream));
}

}  // namespace

void bind_program(py::module_& m) {
    using namespace py::literals;
    m.attr("LEFT") = kLeft;
    py::class_<Rows>(m, "Rows").def(py::init([](int buffer, int64_t column, int64_t stride, int dtype) {
        return Rows{buffer, column, stride, dtype_of(dtype)};
    }));
    py::class_<Program>(m, "Program")
        .def(py::init())
        .def("buffer", &Program::buffer)
        .def("begin", &Program::begin)
        .def("truncate", &Program::truncate)
        .def("size", &Program::size)
        .def("norm",
             [](Program& program, const Norm& norm, const Rows& y) { program.norm(norm_of(norm), y); })
        .def("leave", [](Program& program, Address factors) { program.leave(floats(factors)); })
        .def("norms", [](Program& program, const std::vector<Norm>& norms, const std::vector<Rows>& x,
                         const std::vector<Rows>& y) { program.norms(norms_of(norms), x, y); })
        .def("product", [](Program& program, const Weights& weights, int kernel, const Rows& x,
                           const Rows& y) { program.product(weights_of(weights), kernel, x, y); })
        .def("scale", [](Program& program, Address factors, int64_t columns, const Rows& x,
                         const Rows& y) { program.scale(floats(factors), columns, x, y); })
        .def("conv",
             [](Program& program, Address weight, Address bias, const View& state, int64_t d, int64_t width,
                bool has_silu, const Rows& x, const Rows& y) {
                 const View none = {0, 0, x.dtype};
                 program.conv(conv_params({}, none, weight, bias, state, none, d, width, has_silu), x, y);
             })
        .def("scan",
             [](Program& program, Address A, Address D, Address dt_bias, const View& state, int64_t d,
                int64_t n, const Rows& x, const Rows& dt, const Rows& B, const Rows& C, const Rows& z,
                const Rows& y) {
                 const View none = {0, 0, x.dtype};
                 program.scan(scan_params({}, none, none, A, none, none, D, none, dt_bias, state, none, d, n),
                              x, dt, B, C, z, y);
             })
        .def("scan_heads", &Program::scan_heads)
        .def("gate",
             [](Program& program, int64_t heads, int64_t d, Address weight, int64_t weight_stride, float eps,
                bool gate_first, const Rows& x, const Rows& gate, const Rows& y) {
                 program.gate(gated_norm_params(0, heads, d, kNone, kNone, weight, weight_stride, eps,
                                                gate_first, kNone),
                              x, gate, y);
             })
        .def("multiply", &Program::multiply)
        .def("rope",
             [](Program& program, int64_t heads, int64_t head_dim, Address weight, float eps, Address steps,
                int64_t pairs, const Rows& x, const Rows& y) {
                 program.rope(
                     norm_rope_params(0, heads, head_dim, kNone, weight, eps, steps, pairs, 0, kNone), x, y);
             })
        .def(
            "attend",
            [](Program& program, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
               Address k_cache, Address v_cache, const Rows& q, const Rows& k, const Rows& v, const Rows& y) {
                AttentionParams params;
                params.heads = heads;
                params.kv_heads = kv_heads;
                params.head_dim = head_dim;
                params.scale = scale;
                params.k_cache = pointer(k_cache);
                params.v_cache = pointer(v_cache);
                program.attend(params, q, k, v, y);
            })
        .def("sigmoid", &Program::sigmoid)
        .def("workspace_bytes",
             [](const Program& program, int64_t tokens, const Kernels& kernels) {
                 return program.workspace_bytes(tokens, kernels_of(kernels));
             })
        .def("run", &run, ReleaseGil(), "batch"_a, "sum"_a, "delta"_a, "pending"_a, "left"_a, "workspace"_a,
             "kernels"_a, "lists"_a, "pages"_a, "stream"_a);
}

}  // namespace cuda
}  // namespace apcbatch
