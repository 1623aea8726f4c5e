// Python bindings (pybind11) of apcbatch._CUDA: norms, top-k, argmax and log-probabilities, attention. The
// Python side checks shapes and keeps the memory alive until the kernels have run.
#include <pybind11/stl.h>

#include "addresses.h"
#include "rows.h"

namespace apcbatch {
namespace cuda {
namespace {

NormParams norm(int64_t t, int64_t h, Address x, int64_t x_stride, int x_dtype, Address delta,
                int64_t delta_stride, int delta_dtype, Address weight, float eps, Address y, int y_dtype) {
    return {t,
            h,
            pointer(x),
            x_stride,
            DType(x_dtype),
            pointer(delta),
            delta_stride,
            DType(delta_dtype),
            floats(weight),
            eps,
            pointer(y),
            DType(y_dtype)};
}

void bound_rms_norms(const std::vector<NormParams>& norms, Address stream) {
    const py::gil_scoped_release released;
    rms_norms(norms.data(), int(norms.size()), stream_of(stream));
}

void bound_silu_mul(int64_t t, int64_t f, Address gate, int64_t gate_stride, Address up, int64_t up_stride,
                    Address y, int dtype, Address stream) {
    silu_mul({t, f, pointer(gate), gate_stride, pointer(up), up_stride, pointer(y), f, DType(dtype)},
             stream_of(stream));
}

void bound_softmax_topk(int64_t t, int64_t n, int64_t k, Address logits, int64_t stride, Address weights,
                        Address indices, Address stream) {
    softmax_topk({t, n, k, floats(logits), stride, static_cast<float*>(pointer(weights)),
                  static_cast<int64_t*>(pointer(indices))},
                 stream_of(stream));
}

void bound_logprob(int64_t t, int64_t n, Address logits, int64_t stride, bool choose, Address tokens,
                   Address logprobs, Address stream) {
    logprob({t, n, floats(logits), stride, choose, static_cast<int64_t*>(pointer(tokens)),
             static_cast<float*>(pointer(logprobs))},
            stream_of(stream));
}

void bound_paged_attention(int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t head_dim,
                           float scale, Address q, int64_t q_stride, Address k_cache, Address v_cache,
                           int dtype, Address page_table, int64_t page_table_stride, Address cu_seqlens,
                           Address context, Address out, int64_t max_new, int64_t max_context, Address parts,
                           Address stream) {
    PagedAttention params{};
    static_cast<AttentionParams&>(params) = {num_sequences,
                                             heads,
                                             kv_heads,
                                             head_dim,
                                             scale,
                                             pointer(q),
                                             q_stride,
                                             DType(dtype),
                                             pointer(k_cache),
                                             pointer(v_cache),
                                             DType(dtype),
                                             integers(page_table),
                                             page_table_stride,
                                             integers(cu_seqlens),
                                             integers(context),
                                             pointer(out)};
    params.max_new = max_new;
    params.max_context = max_context;
    params.parts = static_cast<float*>(pointer(parts));
    paged_attention(params, stream_of(stream));
}

void bound_write_kv(int64_t t, int64_t row, Address k, int64_t k_stride, Address v, int64_t v_stride,
                    int dtype, Address k_cache, Address v_cache, Address token_slots, Address stream) {
    write_kv({t, row, pointer(k), k_stride, pointer(v), v_stride, DType(dtype), pointer(k_cache),
              pointer(v_cache), DType(dtype), integers(token_slots)},
             stream_of(stream));
}

}  // namespace

void bind_rows(py::module_& m) {
    m.attr("MOST_CHOICES") = kMostChoices;
    m.attr("MOST_HEAD_DIM") = kMostHeadDim;
    m.attr("SPLIT_TOKENS") = kSplitTokens;
    m.attr("MOST_SPLIT_HEADS") = kMostSplitHeads;
    py::class_<NormParams>(m, "Norm").def(py::init(&norm));
    m.def("rms_norms", &bound_rms_norms);
    m.def("silu_mul", &bound_silu_mul, ReleaseGil());
    m.def("softmax_topk", &bound_softmax_topk, ReleaseGil());
    m.def("logprob", &bound_logprob, ReleaseGil());
    m.def("paged_attention", &bound_paged_attention, ReleaseGil());
    m.def("write_kv", &bound_write_kv, ReleaseGil());
}

}  // namespace cuda
}  // namespace apcbatch
