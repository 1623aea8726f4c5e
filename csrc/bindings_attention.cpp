// Python bindings (pybind11) of paged attention, of the ops on heads around it, and of the checks of its
// indices.
#include "attention.h"

#include <tuple>

#include "bindings.h"
#include "head_rows.h"

namespace apcbatch {
namespace {

// k, v: (t, row). k_cache, v_cache: contiguous, of one type. token_slots: (t).
KvParams kv_params(std::int64_t t, std::int64_t row, const View& k, const View& v, const View& k_cache,
                   const View& v_cache, Address token_slots) {
    KvParams p;
    p.t = t;
    p.row = row;
    p.k = values(k, t);
    p.k_stride = k.stride;
    p.v = values(v, k.dtype, t);
    p.v_stride = v.stride;
    p.dtype = k.dtype;
    p.k_cache = values(k_cache, t);
    p.v_cache = values(v_cache, k_cache.dtype, t);
    p.cache_dtype = k_cache.dtype;
    p.token_slots = integers(token_slots, t);
    return p;
}

// Sequences of a pass: b, address of page_table (b, columns), columns, addresses of cu_seqlens and context.
using Sequences = std::tuple<std::int64_t, Address, std::int64_t, Address, Address>;

PagedSequences paged_sequences(const Sequences& sequences) {
    const auto& [b, page_table, columns, cu_seqlens, context] = sequences;
    return {b, integers(page_table, kMaybe), columns, integers(cu_seqlens, 1), integers(context, b), nullptr};
}

// q, out: (t, heads, head_dim), out contiguous. k_cache, v_cache: contiguous, of one type.
AttentionParams attention_params(const View& q, const View& k_cache, const View& v_cache, const View& out,
                                 const Sequences& sequences, std::int64_t heads, std::int64_t kv_heads,
                                 std::int64_t head_dim, float scale) {
    AttentionParams p = attention_over(paged_sequences(sequences));
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.scale = scale;
    p.q = values(q, kMaybe);
    p.q_stride = q.stride;
    p.q_dtype = q.dtype;
    p.k_cache = values(k_cache, kMaybe);
    p.v_cache = values(v_cache, k_cache.dtype, kMaybe);
    p.cache_dtype = k_cache.dtype;
    p.out = values(out, q.dtype, kMaybe);
    return p;
}

int bound_check_sequences(const Sequences& sequences, std::int64_t t, std::int64_t pages) {
    return int(check_sequences(paged_sequences(sequences), t, pages));
}

// Returns the smallest and the largest of `count` integers, 1 or more.
py::tuple span(Address values, std::int64_t count) {
    const std::int64_t* p = integers(values, count);
    if (count == 0) throw std::invalid_argument("no integers have neither a smallest nor a largest");
    std::int64_t lowest = p[0], highest = p[0];
    for (std::int64_t i = 1; i < count; ++i) {
        lowest = p[i] < lowest ? p[i] : lowest;
        highest = p[i] > highest ? p[i] : highest;
    }
    return py::make_tuple(lowest, highest);
}

}  // namespace
}  // namespace apcbatch

void bind_attention(py::module_& m) {
    using namespace apcbatch;
    m.attr("PAGE_TOKENS") = kPageTokens;
    m.def("span", &span);
    m.def("check_sequences", &bound_check_sequences);
    m.def("norm_rope", bound(&norm_rope, &norm_rope_params), ReleaseGil());
    m.def("sigmoid_mul", bound(&sigmoid_mul, &sigmoid_mul_params), ReleaseGil());
    m.def("write_kv", bound(&write_kv, &kv_params), ReleaseGil());
    m.def("paged_attention", bound(&paged_attention, &attention_params), ReleaseGil());
}
