// The single kernels for Python (pybind11). They take addresses and strides; the Python side checks shapes.
#include <string>

#include "attention.h"
#include "bindings.h"
#include "dispatch.h"
#include "linear.h"
#include "rowwise.h"
#include "scan.h"

namespace {

// ---- instruction sets

constexpr apcbatch::Isa kIsas[] = {apcbatch::Isa::plain, apcbatch::Isa::avx2, apcbatch::Isa::avx512,
                                   apcbatch::Isa::avx512bf16};

bool set_isa(const std::string& name) {
    for (const apcbatch::Isa isa : kIsas) {
        if (name == apcbatch::isa_name(isa)) return apcbatch::set_isa(isa);
    }
    return false;
}

void bind_isa(py::module_& m) {
    m.def("isa", [] { return apcbatch::isa_name(apcbatch::isa()); });
    m.def("set_isa", &set_isa);  // false where the processor lacks it or the name is none
    m.def("available_isas", [] {
        py::list names;
        for (const apcbatch::Isa isa : kIsas) {
            if (apcbatch::isa_available(isa)) names.append(apcbatch::isa_name(isa));
        }
        return names;
    });
}

// ---- linear

void pack_linear(Address weight, int64_t stride, int64_t out, int64_t in, int dtype, Address packed) {
    apcbatch::pack_linear(pointer(weight), stride, out, in, apcbatch::DType(dtype), pointer(packed));
}

void unpack_rows(Address packed, int64_t out, int64_t in, int dtype, Address indices, int64_t count,
                 Address rows, int num_threads) {
    apcbatch::unpack_rows(pointer(packed), out, in, apcbatch::DType(dtype),
                          static_cast<const int64_t*>(pointer(indices)), count, pointer(rows), num_threads);
}

void linear(int64_t t, int64_t in, int64_t out, Address x, int64_t x_stride, int x_dtype, Address w,
            int w_dtype, Address bias, Address y, int64_t y_stride, int y_dtype, int num_threads) {
    apcbatch::LinearArgs args;
    args.t = t;
    args.in = in;
    args.out = out;
    args.x = pointer(x);
    args.x_stride = x_stride;
    args.x_rows = nullptr;
    args.x_dtype = apcbatch::DType(x_dtype);
    args.w = pointer(w);
    args.w_dtype = apcbatch::DType(w_dtype);
    args.bias = static_cast<const float*>(pointer(bias));
    args.y = pointer(y);
    args.y_stride = y_stride;
    args.y_dtype = apcbatch::DType(y_dtype);
    apcbatch::linear(args, num_threads);
}

void bind_linear(py::module_& m) {
    m.def("packed_bytes", [](int64_t out, int64_t in, int dtype) {
        return apcbatch::packed_bytes(out, in, apcbatch::DType(dtype));
    });
    m.def("pack_linear", &pack_linear, ReleaseGil());
    m.def("unpack_rows", &unpack_rows, ReleaseGil());
    m.def("linear", &linear, ReleaseGil());
}

// ---- row-wise ops

void rms_norm(int64_t t, int64_t h, Address x, int64_t x_stride, int x_dtype, Address delta,
              int64_t delta_stride, int delta_dtype, Address weight, float eps, Address y, int y_dtype,
              int num_threads) {
    apcbatch::NormParams p;
    p.t = t;
    p.h = h;
    p.x = pointer(x);
    p.x_stride = x_stride;
    p.x_dtype = apcbatch::DType(x_dtype);
    p.delta = pointer(delta);
    p.delta_stride = delta_stride;
    p.delta_dtype = apcbatch::DType(delta_dtype);
    p.weight = static_cast<const float*>(pointer(weight));
    p.eps = eps;
    p.y = pointer(y);
    p.y_dtype = apcbatch::DType(y_dtype);
    apcbatch::rms_norm(p, num_threads);
}

void silu_mul(int64_t t, int64_t f, Address gate, int64_t gate_stride, Address up, int64_t up_stride,
              Address y, int dtype, int num_threads) {
    apcbatch::SiluMulParams p;
    p.t = t;
    p.f = f;
    p.gate = pointer(gate);
    p.gate_stride = gate_stride;
    p.up = pointer(up);
    p.up_stride = up_stride;
    p.y = pointer(y);
    p.y_stride = f;
    p.dtype = apcbatch::DType(dtype);
    apcbatch::silu_mul(p, num_threads);
}

void softmax_topk(int64_t t, int64_t n, int64_t k, Address logits, int64_t stride, Address weights,
                  Address indices, int num_threads) {
    apcbatch::TopkParams p;
    p.t = t;
    p.n = n;
    p.k = k;
    p.logits = static_cast<const float*>(pointer(logits));
    p.stride = stride;
    p.weights = static_cast<float*>(pointer(weights));
    p.indices = static_cast<int64_t*>(pointer(indices));
    apcbatch::softmax_topk(p, num_threads);
}

void logprob(int64_t t, int64_t n, Address logits, int64_t stride, bool choose, Address tokens,
             Address logprobs, int num_threads) {
    apcbatch::LogprobParams p;
    p.t = t;
    p.n = n;
    p.logits = static_cast<const float*>(pointer(logits));
    p.stride = stride;
    p.choose = choose;
    p.tokens = static_cast<int64_t*>(pointer(tokens));
    p.logprobs = static_cast<float*>(pointer(logprobs));
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
    apcbatch::KvParams p;
    p.t = t;
    p.row = row;
    p.k = pointer(k);
    p.k_stride = k_stride;
    p.v = pointer(v);
    p.v_stride = v_stride;
    p.dtype = apcbatch::DType(dtype);
    p.k_cache = pointer(k_cache);
    p.v_cache = pointer(v_cache);
    p.cache_dtype = apcbatch::DType(cache_dtype);
    p.token_slots = static_cast<const int64_t*>(pointer(token_slots));
    apcbatch::write_kv(p, num_threads);
}

void paged_attention(int64_t num_sequences, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
                     Address q, int64_t q_stride, int q_dtype, Address k_cache, Address v_cache,
                     int cache_dtype, Address page_table, int64_t page_table_stride, Address cu_seqlens,
                     Address context, Address out, int num_threads) {
    apcbatch::AttentionParams p;
    p.num_sequences = num_sequences;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.head_dim = head_dim;
    p.scale = scale;
    p.q = pointer(q);
    p.q_stride = q_stride;
    p.q_dtype = apcbatch::DType(q_dtype);
    p.k_cache = pointer(k_cache);
    p.v_cache = pointer(v_cache);
    p.cache_dtype = apcbatch::DType(cache_dtype);
    p.page_table = static_cast<const int64_t*>(pointer(page_table));
    p.page_table_stride = page_table_stride;
    p.cu_seqlens = static_cast<const int64_t*>(pointer(cu_seqlens));
    p.context = static_cast<const int64_t*>(pointer(context));
    p.out = pointer(out);
    apcbatch::paged_attention(p, num_threads);
}

int check_sequences(int64_t num_sequences, int64_t t, int64_t pages, int64_t columns, Address page_table,
                    Address cu_seqlens, Address context) {
    apcbatch::AttentionParams p{};
    p.num_sequences = num_sequences;
    p.page_table = static_cast<const int64_t*>(pointer(page_table));
    p.page_table_stride = columns;
    p.cu_seqlens = static_cast<const int64_t*>(pointer(cu_seqlens));
    p.context = static_cast<const int64_t*>(pointer(context));
    return int(apcbatch::check_sequences(p, t, pages, columns));
}

// The smallest and the largest of `count` (at least one) integers.
py::tuple span(Address values, int64_t count) {
    const auto* p = static_cast<const int64_t*>(pointer(values));
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

const int64_t* integers(Address address) { return static_cast<const int64_t*>(pointer(address)); }
const float* floats(Address address) { return static_cast<const float*>(pointer(address)); }

apcbatch::RaggedParams ragged_params(int64_t num_sequences, Address cu_seqlens, Address initial_slots,
                                     Address final_slots, Address snapshot_cu, Address snapshot_positions,
                                     Address snapshot_slots) {
    return {num_sequences,           integers(cu_seqlens),  integers(initial_slots),
            integers(final_slots),   integers(snapshot_cu), integers(snapshot_positions),
            integers(snapshot_slots)};
}

void causal_conv(const apcbatch::RaggedParams& ragged, int dtype, int64_t d_inner, int64_t width, Address x,
                 int64_t x_stride, Address weight, Address bias, int weight_dtype, Address state,
                 int64_t state_stride, Address out, int num_threads) {
    apcbatch::ConvParams params;
    params.ragged = ragged;
    params.dtype = apcbatch::DType(dtype);
    params.d_inner = d_inner;
    params.width = width;
    params.x = pointer(x);
    params.x_stride = x_stride;
    params.weight = pointer(weight);
    params.bias = pointer(bias);
    params.weight_dtype = apcbatch::DType(weight_dtype);
    params.state = pointer(state);
    params.state_stride = state_stride;
    params.out = pointer(out);
    params.out_stride = d_inner;
    apcbatch::causal_conv(params, num_threads);
}

void selective_scan(const apcbatch::RaggedParams& ragged, int dtype, int64_t d_inner, int64_t d_state,
                    Address x, int64_t x_stride, Address dt, int64_t dt_stride, Address A, Address B,
                    int64_t B_stride, Address C, int64_t C_stride, Address D, Address z, int64_t z_stride,
                    Address dt_bias, Address state, int64_t state_stride, Address out, int num_threads) {
    apcbatch::ScanParams params;
    params.ragged = ragged;
    params.dtype = apcbatch::DType(dtype);
    params.d_inner = d_inner;
    params.d_state = d_state;
    params.x = pointer(x);
    params.x_stride = x_stride;
    params.dt = pointer(dt);
    params.dt_stride = dt_stride;
    params.A = floats(A);
    params.B = pointer(B);
    params.B_stride = B_stride;
    params.C = pointer(C);
    params.C_stride = C_stride;
    params.D = floats(D);
    params.z = pointer(z);
    params.z_stride = z_stride;
    params.dt_bias = floats(dt_bias);
    params.state = static_cast<float*>(pointer(state));
    params.state_stride = state_stride;
    params.out = pointer(out);
    params.out_stride = d_inner;
    apcbatch::selective_scan(params, num_threads);
}

void elementwise(int function, Address from, Address to, int64_t count) {
    apcbatch::elementwise(apcbatch::Elementwise(function), floats(from), static_cast<float*>(pointer(to)),
                          count);
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
}
