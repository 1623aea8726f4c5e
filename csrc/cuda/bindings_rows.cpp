// Python bindings (pybind11) of apcbatch._CUDA: norms, choice of experts, argmax and log-probabilities,
// attention. The Python side checks shapes and keeps the memory alive until the kernels have run.
#include <pybind11/stl.h>

#include <tuple>

#include "addresses.h"
#include "rows.h"

namespace apcbatch {
namespace cuda {
namespace {

SumNormParams norm(int64_t t, int64_t h, const View& x, const View& delta, Address weight, float eps,
                   const View& y) {
    return {norm_params(t, h, x, delta, weight, eps, y), {}};
}

void bound_rms_norms(const std::vector<SumNormParams>& norms, Address stream) {
    const py::gil_scoped_release released;
    rms_norms(norms.data(), int(norms.size()), stream_of(stream));
}

void bound_rms_norm(int64_t t, int64_t h, const View& x, const View& delta, Address weight, float eps,
                    const View& y, const PendingAddresses& pending, Address stream) {
    SumNormParams p = norm(t, h, x, delta, weight, eps, y);
    p.pending = pending_of(pending);
    rms_norm(p, stream_of(stream));
}

// gate, up, y: (t, f), of one type.
void bound_silu_mul(int64_t t, int64_t f, const View& gate, const View& up, const View& y, Address stream) {
    silu_mul({t, f, values(gate, t * f), gate.stride, values(up, gate.dtype, t * f), up.stride,
              values(y, gate.dtype, t * f), y.stride, gate.dtype},
             stream_of(stream));
}

// present: (1), grouped: GROUPS_BYTES + 4 t k bytes, or none of these. The others: see routing_params.
void bound_route(int64_t t, int64_t n, int64_t k, const View& logits, const RoutingRule& rule,
                 Address weights, Address indices, Address present, Address grouped, Address stream) {
    route(routing_params(t, n, k, logits, rule, weights, indices), apcbatch::integers(present, kMaybe),
          static_cast<Groups*>(pointer(grouped)), stream_of(stream));
}

// logits: (t, n) float32. tokens: (t), written if `choose`, else read. logprobs: (t) or none.
void bound_logprob(int64_t t, int64_t n, const View& logits, bool choose, Address tokens, Address logprobs,
                   Address stream) {
    logprob({t, n, static_cast<float*>(values(logits, DType::float32, t)), logits.stride, choose,
             apcbatch::integers(tokens, t), apcbatch::floats(logprobs, kMaybe)},
            stream_of(stream));
}

// Sequences of a pass: b, address of page_table (b, columns), columns, addresses of cu_seqlens and context.
using Sequences = std::tuple<int64_t, Address, int64_t, Address, Address>;

// q, out: (t, heads, head_dim), out contiguous. k_cache, v_cache: contiguous. All of one type.
void bound_paged_attention(const View& q, const View& k_cache, const View& v_cache, const View& out,
                           const Sequences& sequences, int64_t heads, int64_t kv_heads, int64_t head_dim,
                           float scale, int64_t max_new, int64_t max_context, Address parts, Address stream) {
    PagedAttention params{};
    static_cast<AttentionParams&>(params) = {std::get<0>(sequences),
                                             heads,
                                             kv_heads,
                                             head_dim,
                                             scale,
                                             values(q, kMaybe),
                                             q.stride,
                                             q.dtype,
                                             values(k_cache, q.dtype, kMaybe),
                                             values(v_cache, q.dtype, kMaybe),
                                             q.dtype,
                                             apcbatch::integers(std::get<1>(sequences), kMaybe),
                                             std::get<2>(sequences),
                                             apcbatch::integers(std::get<3>(sequences), kMaybe),
                                             apcbatch::integers(std::get<4>(sequences), kMaybe),
                                             values(out, q.dtype, kMaybe)};
    params.max_new = max_new;
    params.max_context = max_context;
    params.parts = apcbatch::floats(parts, kMaybe);
    paged_attention(params, stream_of(stream));
}

// k, v: (t, row). k_cache, v_cache: contiguous. All of one type. token_slots: (t).
void bound_write_kv(int64_t t, int64_t row, const View& k, const View& v, const View& k_cache,
                    const View& v_cache, Address token_slots, Address stream) {
    write_kv({t, row, values(k, t), k.stride, values(v, k.dtype, t), v.stride, k.dtype,
              values(k_cache, k.dtype, t), values(v_cache, k.dtype, t), k.dtype,
              apcbatch::integers(token_slots, t)},
             stream_of(stream));
}

}  // namespace

void bind_rows(py::module_& m) {
    m.attr("MOST_CHOICES") = kMostChoices;
    m.attr("MOST_HEAD_DIM") = kMostHeadDim;
    m.attr("SPLIT_TOKENS") = kSplitTokens;
    m.attr("MOST_SPLIT_HEADS") = kMostSplitHeads;
    py::class_<SumNormParams>(m, "Norm").def(py::init(&norm));
    m.def("rms_norms", &bound_rms_norms);
    m.def("rms_norm", &bound_rms_norm, ReleaseGil());
    m.def("silu_mul", &bound_silu_mul, ReleaseGil());
    m.def("route", &bound_route, ReleaseGil());
    m.def("logprob", &bound_logprob, ReleaseGil());
    m.def("paged_attention", &bound_paged_attention, ReleaseGil());
    m.def("write_kv", &bound_write_kv, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
