#include "attention_mixer.h"

#include "parts.h"

namespace apcbatch {
namespace {

void write(const AttentionMixer& p, const PagedSequences& sequences, const Rows& qkv, int num_threads) {
    const std::int64_t row = p.kv_heads * p.head_dim, value_bytes = bytes_of(p.dtype);
    KvParams kv;
    kv.t = qkv.t;
    kv.row = row;
    kv.k = static_cast<const char*>(qkv.data) + p.heads * p.head_dim * value_bytes;
    kv.v = static_cast<const char*>(kv.k) + row * value_bytes;
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
    AttentionParams attention;
    attention.num_sequences = sequences.num_sequences;
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
    attention.page_table = sequences.page_table;
    attention.page_table_stride = sequences.page_table_stride;
    attention.cu_seqlens = sequences.cu_seqlens;
    attention.context = sequences.context;
    attention.out = to.data;
    paged_attention(attention, num_threads);
}

}  // namespace

std::int64_t AttentionMixer::scratch_bytes(std::int64_t t) const {
    return t * (2 * o_proj.in + qkv_proj.out) * bytes_of(dtype);
}

void AttentionMixer::run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
                         int num_threads) const {
    const AttentionMixer& p = *this;
    const PagedSequences& sequences = inputs.sequences;
    const std::int64_t t = inputs.t, h = p.o_proj.in, hidden = t * h * bytes_of(p.dtype);
    const Rows normed{t, memory, h, p.dtype}, y{t, memory + hidden, h, p.dtype};
    const Rows qkv{t, memory + 2 * hidden, p.qkv_proj.out, p.dtype};
    pre_norm(p.norm, t, h, residual, normed.data, p.dtype, num_threads);
    project(p.qkv_proj, normed, nullptr, qkv, num_threads);  // (t, h) -> (t, (heads + 2 kv_heads) head_dim)
    {
        const PartTimer timer(Part::attention);
        write(p, sequences, qkv, num_threads);
        attend(p, sequences, qkv, y, num_threads);
    }
    project(p.o_proj, y, nullptr, {t, residual.delta, h, DType::float32}, num_threads);  // (t, h) -> (t, h)
}

}  // namespace apcbatch
