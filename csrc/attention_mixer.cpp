#include "attention_mixer.h"

#include "head_rows.h"
#include "parts.h"

namespace apcbatch {
namespace {

// Buffers of a pass, consecutive in the workspace.
struct Buffers {
    std::int64_t* positions = nullptr;  // (t); null without norms
    Rows normed, y, qkv;
    std::int64_t bytes;

    Buffers(const AttentionMixer& p, std::int64_t t, char* memory) {
        Workspace workspace(memory);
        if (!p.norms.is_none()) positions = workspace.take<std::int64_t>(t);
        normed = workspace.rows(t, p.qkv_proj.in, p.dtype);
        y = workspace.rows(t, p.o_proj.in, p.dtype);
        qkv = workspace.rows(t, p.qkv_proj.out, p.dtype);
        bytes = workspace.bytes();
    }
};

// Writes the absolute position of each token of the pass.
void write_positions(const PagedSequences& sequences, std::int64_t* positions) {
    for (std::int64_t s = 0; s < sequences.num_sequences; ++s) {
        const std::int64_t begin = sequences.cu_seqlens[s], end = sequences.cu_seqlens[s + 1];
        for (std::int64_t i = begin; i < end; ++i) positions[i] = sequences.context[s] + i - begin;
    }
}

// Norms and rotates `heads` heads from column `column` on, in place.
void norm_heads(const AttentionMixer& p, const Rows& qkv, std::int64_t column, std::int64_t heads,
                const float* weight, const std::int64_t* positions, int num_threads) {
    NormRopeParams rows;
    rows.t = qkv.t;
    rows.heads = heads;
    rows.head_dim = p.head_dim;
    rows.x = rows.y = columns_from(qkv, column).data;
    rows.x_stride = rows.y_stride = qkv.stride;
    rows.weight = weight;
    rows.eps = p.norms.eps;
    rows.steps = p.norms.steps;
    rows.pairs = p.norms.pairs;
    rows.positions = positions;
    rows.dtype = p.dtype;
    norm_rope(rows, num_threads);
}

// Multiplies the output of attention by the sigmoids of the gates, in place.
void gate(const AttentionMixer& p, const Rows& qkv, const Rows& y, int num_threads) {
    SigmoidMulParams rows;
    rows.t = y.t;
    rows.h = rows.x_stride = rows.y_stride = y.stride;
    rows.x = rows.y = y.data;
    rows.gate = columns_from(qkv, (p.heads + 2 * p.kv_heads) * p.head_dim).data;
    rows.gate_stride = qkv.stride;
    rows.dtype = p.dtype;
    sigmoid_mul(rows, num_threads);
}

void write(const AttentionMixer& p, const PagedSequences& sequences, const Rows& qkv, int num_threads) {
    const std::int64_t row = p.kv_heads * p.head_dim;
    KvParams kv;
    kv.t = qkv.t;
    kv.row = row;
    kv.k = columns_from(qkv, p.heads * p.head_dim).data;
    kv.v = columns_from(qkv, p.heads * p.head_dim + row).data;
    kv.k_stride = kv.v_stride = qkv.stride;
    kv.dtype = p.dtype;
    kv.k_cache = p.k_cache;
    kv.v_cache = p.v_cache;
    kv.cache_dtype = p.cache_dtype;
    kv.token_slots = sequences.token_slots;
    write_kv(kv, num_threads);
}

void attend(const AttentionMixer& p, const PagedSequences& sequences, const Rows& qkv, const Rows& to,
            int num_threads) {
    AttentionParams attention = attention_over(sequences);
    attention.heads = p.heads;
    attention.kv_heads = p.kv_heads;
    attention.head_dim = p.head_dim;
    attention.scale = p.scale;
    attention.q = qkv.data;
    attention.q_stride = qkv.stride;
    attention.q_dtype = p.dtype;
    attention.k_cache = p.k_cache;
    attention.v_cache = p.v_cache;
    attention.cache_dtype = p.cache_dtype;
    attention.out = to.data;
    paged_attention(attention, num_threads);
}

}  // namespace

std::int64_t AttentionMixer::scratch_bytes(std::int64_t t) const { return Buffers(*this, t, nullptr).bytes; }

void AttentionMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                         int num_threads) const {
    const AttentionMixer& p = *this;
    const PagedSequences& sequences = inputs.sequences;
    const std::int64_t t = inputs.t, h = p.qkv_proj.in, d = p.o_proj.in;
    const Buffers buffers(p, t, memory);
    const Rows &y = buffers.y, &qkv = buffers.qkv;
    std::int64_t* positions = buffers.positions;
    pre_norm(p.norm, residual, buffers.normed, num_threads);
    project(p.qkv_proj, buffers.normed, nullptr, qkv,
            num_threads);  // (t, h) -> (t, (heads + 2 kv_heads [+ heads]) head_dim)
    {
        const PartTimer timer(Part::attention);
        if (positions != nullptr) {
            write_positions(sequences, positions);
            norm_heads(p, qkv, 0, p.heads, p.norms.q, positions, num_threads);
            norm_heads(p, qkv, d, p.kv_heads, p.norms.k, positions, num_threads);
        }
        write(p, sequences, qkv, num_threads);
        attend(p, sequences, qkv, y, num_threads);
        if (p.is_gated) gate(p, qkv, y, num_threads);
    }
    project(p.o_proj, y, nullptr, {t, residual.delta, h, DType::float32}, num_threads);  // (t, d) -> (t, h)
}

}  // namespace apcbatch
