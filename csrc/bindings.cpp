// The one file that knows Python (pybind11). Kernels take addresses and strides; the Python side checks
// shapes.
#include <pybind11/pybind11.h>

#include <string>

#include "attention.h"
#include "dispatch.h"
#include "linear.h"
#include "rowwise.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

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
                 Address rows) {
    apcbatch::unpack_rows(pointer(packed), out, in, apcbatch::DType(dtype),
                          static_cast<const int64_t*>(pointer(indices)), count, pointer(rows));
}

void linear(int64_t t, int64_t in, int64_t out, Address x, int64_t x_stride, int x_dtype, Address w,
            int w_dtype, Address bias, Address y, int64_t y_stride, int y_dtype, int num_threads) {
    apcbatch::LinearArgs args;
    args.t = t;
    args.in = in;
    args.out = out;
    args.x = pointer(x);
    args.x_stride = x_stride;
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

void bind_attention(py::module_& m) {
    m.attr("PAGE_TOKENS") = apcbatch::kPageTokens;
    m.def("write_kv", &write_kv, ReleaseGil());
    m.def("paged_attention", &paged_attention, ReleaseGil());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() =
        "apcbatch kernels: plain C++ over addresses, sizes and strides (private; see apcbatch.kernels.ops)";
    bind_isa(m);
    bind_linear(m);
    bind_rowwise(m);
    bind_attention(m);
}
