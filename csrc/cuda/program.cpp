// See program.h.
#include "program.h"

#include <algorithm>

namespace apcbatch {
namespace cuda {
namespace {

constexpr std::size_t kAlignment = 256;  // alignment in bytes of each buffer

std::size_t aligned(std::int64_t bytes) {
    return (std::size_t(bytes) + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns true if cuBLASLt leaves the pieces of a product to sum_pieces.
bool leaves_parts(const ChainWeights& weights, const ChainKernel& kernel) {
    return kernel.of_library && weights.pieces > 1 && !kernel.in_turn;
}

// Multiplies by a cuBLASLt kernel. Returns false if cuBLASLt does not support the call.
bool multiply_many(const ProductParams& p, const ChainKernel& kernel, void* parts, cudaStream_t stream) {
    ProductParams made = p;
    if (parts) {
        made.y = parts;
        made.y_dtype = DType::float32;
    }
    if (!library_product(made, kernel.in_turn, kernel.choice, stream)) return false;
    if (parts)
        sum_pieces(static_cast<const float*>(parts), std::int64_t(p.rows) * p.out, p.pieces, p.y, p.y_dtype,
                   stream);
    return true;
}

}  // namespace

// A pass under way.
struct Program::Run {
    const ProgramPass& pass;
    cudaStream_t stream;
    std::int64_t t;
    const float* delta;  // what the next norm adds to the sum
    Pending pending;
    std::vector<std::size_t> begins;
    void* parts;  // sums of the pieces of a product

    void* at(const Rows& rows) const {
        char* begin = rows.buffer == kLeft
                          ? reinterpret_cast<char*>(pass.left)
                          : static_cast<char*>(pass.workspace) + begins[std::size_t(rows.buffer)];
        return begin + rows.column * bytes_of(rows.dtype);
    }
};

int Program::buffer(std::int64_t bytes) {
    if (used_ == bytes_.size()) bytes_.push_back(0);
    bytes_[used_] = std::max(bytes_[used_], bytes);
    return int(used_++);
}

void Program::norm(const SumNormParams& params, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        SumNormParams p = params;
        p.t = run.t;
        p.x = run.pass.sum;
        p.delta = run.delta;
        p.pending = run.pending;
        p.x_stride = p.delta_stride = p.h;
        p.y = run.at(y);
        p.y_dtype = y.dtype;
        rms_norm(p, run.stream);
        run.delta = run.pass.left;
    });
}

void Program::leave(const float* factors) {
    ops_.emplace_back([=](Run& run) { run.pending = {factors, nullptr, nullptr, {}}; });
}

void Program::norms(const std::vector<SumNormParams>& params, const std::vector<Rows>& x,
                    const std::vector<Rows>& y) {
    ops_.emplace_back([=](Run& run) {
        std::vector<SumNormParams> all = params;
        for (std::size_t i = 0; i < all.size(); ++i) {
            all[i].t = run.t;
            all[i].x = run.at(x[i]);
            all[i].x_stride = x[i].stride;
            all[i].x_dtype = x[i].dtype;
            all[i].y = run.at(y[i]);
            all[i].y_dtype = y[i].dtype;
        }
        rms_norms(all.data(), int(all.size()), run.stream);
    });
}

void Program::product(const ChainWeights& weights, int kernel, const Rows& x, const Rows& y) {
    products_.emplace_back(weights, kernel);
    ops_.emplace_back([=](Run& run) {
        const ChainKernel& chosen = run.pass.kernels[std::size_t(kernel)];
        ProductParams p = {int(run.t), weights.in, weights.out, x.dtype, weights.weight,
                           run.at(x),  x.stride,   run.at(y),   y.dtype, weights.pieces};
        if (weights.coded) {
            if (run.t <= kMostCodedRows && takes_coded_product(*weights.coded, weights.pieces))
                return coded_product(*weights.coded, p, run.stream);
            decode(*weights.coded, run.stream);
            p.weight = weights.coded->scratch->memory;
        }
        void* parts = leaves_parts(weights, chosen) ? run.parts : nullptr;
        if (!chosen.of_library || !multiply_many(p, chosen, parts, run.stream)) own_product(p, run.stream);
    });
}

void Program::scale(const float* factors, std::int64_t columns, const Rows& x, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        scale_columns(static_cast<const float*>(run.at(x)), factors, run.t, columns, run.at(y), y.dtype,
                      run.stream);
    });
}

void Program::conv(const ConvParams& params, const Rows& x, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        ConvParams p = params;
        p.ragged = run.pass.batch.ragged;
        p.x = run.at(x);
        p.x_stride = x.stride;
        p.out = run.at(y);
        p.out_stride = y.stride;
        causal_conv(p, run.pass.batch, run.stream);
    });
}

void Program::scan(const ScanParams& params, const Rows& x, const Rows& dt, const Rows& B, const Rows& C,
                   const Rows& z, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        ScanParams p = params;
        p.ragged = run.pass.batch.ragged;
        p.x = run.at(x);
        p.x_stride = x.stride;
        p.dt = run.at(dt);
        p.dt_stride = dt.stride;
        p.B = run.at(B);
        p.B_stride = B.stride;
        p.C = run.at(C);
        p.C_stride = C.stride;
        p.z = run.at(z);
        p.z_stride = z.stride;
        p.out = run.at(y);
        p.out_stride = y.stride;
        selective_scan(p, run.pass.batch, 0, run.stream);
    });
}

void Program::scan_heads(const HeadScanParams& params, const Rows& x, const Rows& gates, const Rows& memory,
                         const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        const HeadScanParams p = head_scan_over(params, run.pass.batch.ragged, run.at(x), x.stride,
                                                run.at(gates), gates.stride, static_cast<float*>(run.at(y)));
        head_scan(p, run.pass.batch, 0, run.at(memory), run.stream);
    });
}

void Program::gate(const GatedNormParams& params, const Rows& x, const Rows& gate, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        GatedNormParams p = params;
        p.t = run.t;
        p.x = static_cast<float*>(run.at(x));
        p.x_stride = x.stride;
        p.gate = run.at(gate);
        p.gate_stride = gate.stride;
        p.y = run.at(y);
        p.dtype = gate.dtype;
        gated_norm(p, run.stream);
    });
}

void Program::multiply(std::int64_t columns, const Rows& gate, const Rows& up, bool has_silu, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        silu_mul({run.t, columns, run.at(gate), gate.stride, run.at(up), up.stride, run.at(y), y.stride,
                  y.dtype, has_silu},
                 run.stream);
    });
}

void Program::rope(const NormRopeParams& params, const Rows& x, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        NormRopeParams p = params;
        p.t = run.t;
        p.positions = run.pass.positions;
        p.x = run.at(x);
        p.x_stride = x.stride;
        p.y = run.at(y);
        p.y_stride = y.stride;
        p.dtype = y.dtype;
        norm_rope(p, run.stream);
    });
}

void Program::attend(const AttentionParams& params, const Rows& q, const Rows& k, const Rows& v,
                     const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        const ProgramPass& pass = run.pass;
        write_kv(
            {run.t, params.kv_heads * params.head_dim, run.at(k), k.stride, run.at(v), v.stride, k.dtype,
             const_cast<void*>(params.k_cache), const_cast<void*>(params.v_cache), k.dtype, pass.token_slots},
            run.stream);
        PagedAttention p{};
        static_cast<AttentionParams&>(p) = params;
        p.num_sequences = pass.batch.ragged.num_sequences;
        p.q = run.at(q);
        p.q_stride = q.stride;
        p.q_dtype = p.cache_dtype = q.dtype;
        p.page_table = pass.page_table;
        p.page_table_stride = pass.pages;
        p.cu_seqlens = pass.batch.ragged.cu_seqlens;
        p.context = pass.context;
        p.out = run.at(y);
        p.max_new = run.t - p.num_sequences + 1;
        p.max_context = pass.pages * kPageTokens;
        paged_attention(p, run.stream);
    });
}

void Program::sigmoid(std::int64_t columns, const Rows& x, const Rows& gate, const Rows& y) {
    ops_.emplace_back([=](Run& run) {
        SigmoidMulParams p;
        p.t = run.t;
        p.h = columns;
        p.x = run.at(x);
        p.x_stride = x.stride;
        p.gate = run.at(gate);
        p.gate_stride = gate.stride;
        p.y = run.at(y);
        p.y_stride = y.stride;
        p.dtype = y.dtype;
        sigmoid_mul(p, run.stream);
    });
}

std::size_t Program::workspace_bytes(std::int64_t tokens, const std::vector<ChainKernel>& kernels) const {
    std::size_t bytes = 0;
    for (const std::int64_t each : bytes_) bytes += aligned(each * tokens);
    std::int64_t parts = 0;
    for (const auto& [weights, kernel] : products_) {
        if (leaves_parts(weights, kernels[std::size_t(kernel)])) {
            parts = std::max(parts, std::int64_t(weights.pieces) * weights.out);
        }
    }
    return bytes + aligned(parts * tokens * std::int64_t(sizeof(float)));
}

void Program::run(const ProgramPass& pass, cudaStream_t stream) const {
    Run run = {pass, stream, pass.batch.num_tokens, pass.delta, pass.pending, {}, nullptr};
    std::size_t begin = 0;
    for (const std::int64_t each : bytes_) {
        run.begins.push_back(begin);
        begin += aligned(each * run.t);
    }
    run.parts = static_cast<char*>(pass.workspace) + begin;
    for (const auto& op : ops_) op(run);
}

}  // namespace cuda
}  // namespace apcbatch
