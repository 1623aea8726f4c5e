#include "attention_mixer.h"

#include "parts.h"
#include "scratch.h"

namespace apcbatch {
namespace {

void write(const AttentionMixerParams& p, const PagedSequences& sequences, const Rows& qkv, int num_threads) {
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

void attend(const AttentionMixerParams& p, const PagedSequences& sequences, const Rows& qkv, const Rows& to,
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

void attention_mixer(const AttentionMixerParams& p, const PagedSequences& sequences, const Residual& residual,
                     int num_threads) {
    const std::int64_t t = sequences.cu_seqlens[sequences.num_sequences], h = p.o_proj.in;
    const std::int64_t hidden = t * h * bytes_of(p.dtype), columns = p.qkv_proj.out;
    char* memory = thread_workspace(2 * hidden + t * columns * bytes_of(p.dtype));
    const Rows normed{t, memory, h, p.dtype}, y{t, memory + hidden, h, p.dtype};
    const Rows qkv{t, memory + 2 * hidden, columns, p.dtype};
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
