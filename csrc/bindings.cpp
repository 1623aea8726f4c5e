// The single kernels for Python (pybind11). They take addresses and strides; the Python side checks shapes.
#include <string>

#include "attention.h"
#include "bindings.h"
#include "dispatch.h"
#include "linear.h"
#include "rowwise.h"
#include "scan.h"
#include "scratch.h"

namespace {

// ---- instruction sets

bool set_isa(const std::string& name) {
    for (const apcbatch::Isa isa : apcbatch::kIsas) {
        if (name == apcbatch::isa_name(isa)) return apcbatch::set_isa(isa);
    }
    return false;
}

void bind_isa(py::module_& m) {
    m.def("isa", [] { return apcbatch::isa_name(apcbatch::isa()); });
    m.def("isa_product", [] { return apcbatch::isa_product(apcbatch::isa()); });
    m.def("set_isa", &set_isa);  // false where the processor lacks it or the name is none
    m.def("available_isas", [] {
        py::list names;
        for (const apcbatch::Isa isa : apcbatch::kIsas) {
            if (apcbatch::isa_available(isa)) names.append(apcbatch::isa_name(isa));
        }
        return names;
    });
}

// ---- linear

void pack_linear(Address weight, int64_t stride, int64_t out, int64_t in, int dtype, Address packed,
                 int num_threads) {
    apcbatch::pack_linear(values(weight, dtype, out), stride, out, in, dtype_of(dtype),
                          values(packed, dtype, out), num_threads);
}

void unpack_rows(Address packed, int64_t out, int64_t in, int dtype, Address indices, int64_t count,
                 Address rows, int num_threads) {
    apcbatch::unpack_rows(values(packed, dtype, out), out, in, dtype_of(dtype), integers(indices, count),
                          count, values(rows, dtype, count), num_threads);
}

void linear(int64_t t, int64_t in, int64_t out, Address x, int64_t x_stride, int x_dtype, Address w,
            int w_dtype, Address bias, Address y, int64_t y_stride, int y_dtype, int num_threads) {
    apcbatch::LinearArgs args{};
    args.t = t;
    args.in = in;
    args.out = out;
    args.x = values(x, x_dtype, t);
    args.x_stride = x_stride;
    args.x_rows = nullptr;
    args.x_dtype = dtype_of(x_dtype);
    args.w = values(w, w_dtype, out);
    args.w_dtype = dtype_of(w_dtype);
    args.bias = floats(bias, kMaybe);
    args.y = values(y, y_dtype, t);
    args.y_stride = y_stride;
    args.y_dtype = dtype_of(y_dtype);
    apcbatch::linear(args, num_threads);
}

void bind_linear(py::module_& m) {
    m.def("packed_bytes", [](int64_t out, int64_t in, int dtype) {
        return apcbatch::packed_bytes(out, in, dtype_of(dtype));
    });
    m.def("pack_linear", &pack_linear, ReleaseGil());
    m.def("unpack_rows", &unpack_rows, ReleaseGil());
    m.def("linear", &linear, ReleaseGil());
}

// ---- row-wise ops

void rms_norm(int64_t t, int64_t h, Address x, int64_t x_stride, int x_dtype, Address delta,
              int64_t delta_stride, int delta_dtype, Address weight, float eps, Address y, int y_dtype,
              int num_threads) {
    apcbatch::NormParams p{};
    p.t = t;
    p.h = h;
    p.x = values(x, x_dtype, t * h);
    p.x_stride = x_stride;
    p.x_dtype = dtype_of(x_dtype);
    p.delta = values(delta, delta_dtype, kMaybe);
    p.delta_stride = delta_stride;
    p.delta_dtype = dtype_of(delta_dtype);
    p.weight = floats(weight, kMaybe);
    p.eps = eps;
    p.y = values(y, y_dtype, t * h);
    p.y_dtype = dtype_of(y_dtype);
    apcbatch::rms_norm(p, num_threads);
}

void silu_mul(int64_t t, int64_t f, Address gate, int64_t gate_stride, Address up, int64_t up_stride,
              Address y, int dtype, int num_threads) {
    apcbatch::SiluMulParams p{};
    p.t = t;
    p.f = f;
    p.gate = values(gate, dtype, t * f);
    p.gate_stride = gate_stride;
    p.up = values(up, dtype, t * f);
    p.up_stride = up_stride;
    p.y = values(y, dtype, t * f);
    p.y_stride = f;
    p.dtype = dtype_of(dtype);
    apcbatch::silu_mul(p, num_threads);
}

void softmax_topk(int64_t t, int64_t n, int64_t k, Address logits, int64_t stride, Address weights,
                  Address indices, int num_threads) {
    apcbatch::TopkParams p{};
    p.t = t;
    p.n = n;
    p.k = k;
    p.logits = floats(logits, t);
    p.stride = stride;
    p.weights = floats(weights, t);
    p.indices = integers(indices, t);
    apcbatch::softmax_topk(p, num_threads);
}

void logprob(int64_t t, int64_t n, Address logits, int64_t stride, bool choose, Address tokens,
             Address logprobs, int num_threads) {
    apcbatch::LogprobParams p{};
    p.t = t;
    p.n = n;
    p.logits = floats(logits, t);
    p.stride = stride;
    p.choose = choose;
    p.tokens = integers(tokens, t);
    p.logprobs = floats(logprobs, kMaybe);
    apcbatch::logprob(p, num_threads);
}

void bind_rowwise(py::module_& m) {
    m.def("rms_norm", &rms_norm, ReleaseGil());
    m.def("silu_mul", &silu_mul, ReleaseGil());
    m.def("softmax_topk", &softmax_topk, ReleaseGil());
    m.def("logprob", &logprob, ReleaseGil());
}

// ---- attention

void write_kv(int64_t t, int64_t row, Address k, int64_t k_stride, Address v, int64_t v_stride, int dtype,
              Address k_cache, Address v_cache, int cache_dtype, Address token_slots, int num_threads) {
    apcbatch::KvParams p{};
    p.t = t;
    p.row = row;
    p.k = values(k, dtype, t);
    p.k_stride = k_stride;
    p.v = values(v, dtype, t);
    p.v_stride = v_stride;
    p.dtype = dtype_of(dtype);
    p.k_cache = values(k_cache, cache_dtype, t);
    p.v_cache = values(v_cache, cache_dtype, t);
    p.cache_dtype = dtype_of(cache_dtype);
    p.token_slots = integers(token_slots, t);
    apcbatch::write_kv(p, num_threads);
}

void paged_attention(int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
                     Address q, int64_t q_stride, int q_dtype, Address k_cache, Address v_cache,
                     int cache_dtype, Address page_table, int64_t page_table_stride, Address cu_seqlens,
                     Address context, Address out, int num_threads) {
    apcbatch::AttentionParams p{};
    p.num_sequences = num_sequences;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.scale = scale;
    p.q = values(q, q_dtype, kMaybe);
    p.q_stride = q_stride;
    p.q_dtype = dtype_of(q_dtype);
    p.k_cache = values(k_cache, cache_dtype, kMaybe);
    p.v_cache = values(v_cache, cache_dtype, kMaybe);
    p.cache_dtype = dtype_of(cache_dtype);
    p.page_table = integers(page_table, kMaybe);
    p.page_table_stride = page_table_stride;
    p.cu_seqlens = integers(cu_seqlens, num_sequences);
    p.context = integers(context, num_sequences);
    p.out = values(out, q_dtype, kMaybe);
    apcbatch::paged_attention(p, num_threads);
}

int check_sequences(int64_t num_sequences, int64_t t, int64_t pages, int64_t columns, Address page_table,
                    Address cu_seqlens, Address context) {
    apcbatch::AttentionParams p{};
    p.num_sequences = num_sequences;
    p.page_table = integers(page_table, kMaybe);
    p.page_table_stride = columns;
    p.cu_seqlens = integers(cu_seqlens, 1);
    p.context = integers(context, num_sequences);
    return int(apcbatch::check_sequences(p, t, pages, columns));
}

// The smallest and the largest of `count` (at least one) integers.
py::tuple span(Address values, int64_t count) {
    const int64_t* p = integers(values, count);
    if (count == 0) throw std::invalid_argument("no integers have neither a smallest nor a largest");
    int64_t lowest = p[0], highest = p[0];
    for (int64_t i = 1; i < count; ++i) {
        lowest = p[i] < lowest ? p[i] : lowest;
        highest = p[i] > highest ? p[i] : highest;
    }
    return py::make_tuple(lowest, highest);
}

void bind_attention(py::module_& m) {
    m.attr("PAGE_TOKENS") = apcbatch::kPageTokens;
    m.def("span", &span);
    m.def("check_sequences", &check_sequences);
    m.def("write_kv", &write_kv, ReleaseGil());
    m.def("paged_attention", &paged_attention, ReleaseGil());
}

// ---- causal_conv, selective_scan

apcbatch::RaggedParams ragged_params(int64_t num_sequences, Address cu_seqlens, Address initial_slots,
                                     Address final_slots, Address snapshot_cu, Address snapshot_positions,
                                     Address snapshot_slots) {
    const int64_t b = num_sequences;
    return {b,
            integers(cu_seqlens, 1),
            integers(initial_slots, b),
            integers(final_slots, b),
            integers(snapshot_cu, 1),
            integers(snapshot_positions, kMaybe),
            integers(snapshot_slots, kMaybe)};
}

void causal_conv(const apcbatch::RaggedParams& ragged, int dtype, int64_t d_inner, int64_t width, Address x,
                 int64_t x_stride, Address weight, Address bias, int weight_dtype, Address state,
                 int64_t state_stride, Address out, int num_threads) {
    apcbatch::ConvParams params{};
    params.ragged = ragged;
    params.dtype = dtype_of(dtype);
    params.d_inner = d_inner;
    params.width = width;
    params.x = values(x, dtype, ragged.num_sequences);
    params.x_stride = x_stride;
    params.weight = values(weight, weight_dtype, d_inner);
    params.bias = values(bias, weight_dtype, kMaybe);
    params.weight_dtype = dtype_of(weight_dtype);
    params.state = values(state, dtype, kMaybe);
    params.state_stride = state_stride;
    params.out = values(out, dtype, ragged.num_sequences);
    params.out_stride = d_inner;
    apcbatch::causal_conv(params, num_threads);
}

void selective_scan(const apcbatch::RaggedParams& ragged, int dtype, int64_t d_inner, int64_t d_state,
                    Address x, int64_t x_stride, Address dt, int64_t dt_stride, Address A, Address B,
                    int64_t B_stride, Address C, int64_t C_stride, Address D, Address z, int64_t z_stride,
                    Address dt_bias, Address state, int64_t state_stride, Address out, int num_threads) {
    const int64_t b = ragged.num_sequences;
    apcbatch::ScanParams params{};
    params.ragged = ragged;
    params.dtype = dtype_of(dtype);
    params.d_inner = d_inner;
    params.d_state = d_state;
    params.x = values(x, dtype, b);
    params.x_stride = x_stride;
    params.dt = values(dt, dtype, b);
    params.dt_stride = dt_stride;
    params.A = floats(A, d_inner);
    params.B = values(B, dtype, b);
    params.B_stride = B_stride;
    params.C = values(C, dtype, b);
    params.C_stride = C_stride;
    params.D = floats(D, kMaybe);
    params.z = values(z, dtype, kMaybe);
    params.z_stride = z_stride;
    params.dt_bias = floats(dt_bias, kMaybe);
    params.state = floats(state, kMaybe);
    params.state_stride = state_stride;
    params.out = values(out, dtype, b);
    params.out_stride = d_inner;
    apcbatch::selective_scan(params, num_threads);
}

void elementwise(int function, Address from, Address to, int64_t count) {
    if (function < 0 || function > int(apcbatch::Elementwise::silu)) {
        throw std::invalid_argument("there is no elementwise function " + std::to_string(function));
    }
    apcbatch::elementwise(apcbatch::Elementwise(function), floats(from, count), floats(to, count), count);
}

void bind_scan(py::module_& m) {
    // Holds addresses only: whoever makes one keeps the arrays alive.
    py::class_<apcbatch::RaggedParams>(m, "RaggedParams").def(py::init(&ragged_params));
    m.def("causal_conv", &causal_conv, ReleaseGil());
    m.def("selective_scan", &selective_scan, ReleaseGil());
    m.def("elementwise", &elementwise, ReleaseGil());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "apcbatch kernels: plain C++ over addresses, sizes and strides (private; see apcbatch.kernels.ops)";
    bind_isa(m);
    bind_linear(m);
    bind_scan(m);
    bind_rowwise(m);
    bind_attention(m);
    bind_layers(m);
    m.def("refuse_scratch", &apcbatch::refuse_scratch);  // for tests
}
