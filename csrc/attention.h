// Attention over a paged KV cache: arguments and entry points; attention_tile.h holds the arithmetic.
//
// Arithmetic of one query (one head of one token) at absolute position p: online softmax (Milakov and
// Gimelshein 2018) over pages in ascending order, page i having the keys [64 i, min(64 i + 64, p + 1)). A
// page's scores are chains of fused multiply-adds over head_dim. Then the running maximum, sum and output are
// rescaled once per page. So a query's bits depend on its position and on the keys up to it, never on its
// chunk or batch.
#pragma once

#include <stdint.h>

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

constexpr int64_t kPageTokens = 64;

// Locations of a pass's keys and values in the paged KV cache.
struct PagedSequences {
    int64_t num_sequences = 0;
    const int64_t* page_table = nullptr;  // (b, max_pages), row stride page_table_stride
    int64_t page_table_stride = 0;
    const int64_t* cu_seqlens = nullptr;   // (b + 1)
    const int64_t* context = nullptr;      // (b): tokens cached before this chunk
    const int64_t* token_slots = nullptr;  // (t): page * kPageTokens + offset
};

struct AttentionParams {
    int64_t num_sequences = 0, heads = 0, kv_heads = 0, head_dim = 0;
    float scale = 0.0f;
    const void* q = nullptr;  // (t, heads, head_dim), token stride q_stride
    int64_t q_stride = 0;
    DType q_dtype = DType::float32;
    const void* k_cache = nullptr;  // (pages, kPageTokens, kv_heads, head_dim) contiguous
    const void* v_cache = nullptr;
    DType cache_dtype = DType::float32;
    const int64_t* page_table = nullptr;  // (b, max_pages), row stride page_table_stride
    int64_t page_table_stride = 0;
    const int64_t* cu_seqlens = nullptr;  // (b + 1)
    const int64_t* context = nullptr;     // (b): tokens cached before this chunk
    void* out = nullptr;                  // (t, heads, head_dim) contiguous, q's dtype
};

// Returns arguments with the fields of `sequences`.
inline AttentionParams attention_over(const PagedSequences& sequences) {
    AttentionParams p;
    p.num_sequences = sequences.num_sequences;
    p.page_table = sequences.page_table;
    p.page_table_stride = sequences.page_table_stride;
    p.cu_seqlens = sequences.cu_seqlens;
    p.context = sequences.context;
    return p;
}

// Unit of work: queries [begin, end) of one sequence's chunk, for the heads that share one kv head.
struct AttentionUnit {
    int64_t sequence, kv_head, begin, end;
};

struct KvParams {
    int64_t t = 0, row = 0;   // row: kv_heads * head_dim
    const void* k = nullptr;  // (t, row), token stride k_stride
    int64_t k_stride = 0;
    const void* v = nullptr;
    int64_t v_stride = 0;
    DType dtype = DType::float32;  // of k and v
    void* k_cache = nullptr;
    void* v_cache = nullptr;
    DType cache_dtype = DType::float32;
    const int64_t* token_slots = nullptr;  // (t): page * kPageTokens + offset
};

// Maximum rows of a unit, each a query of one head, for chunks of more than one token.
constexpr int64_t kUnitRows = 96;

// Returns head_dim rounded up to whole tiles: the floats of a cached vector or of an output row in scratch.
constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

constexpr int64_t kWeightRows = 16;  // upper bound of the rows of a tile on any instruction set

// Returns the scratch bytes of a unit: keys, values and one tile's weights, and the queries, outputs, maxima
// and sums of its rows. vectors: for attention_tile.h. matrices: for attention_amx.h, which also needs a
// tile's scores and outputs, and pads queries to whole tiles.
constexpr int64_t attention_scratch_bytes(int64_t head_dim, int64_t rows) {
    const int64_t dim = padded_dim(head_dim), inner = (head_dim + 31) / 32 * 32;
    const int64_t vectors = 4 * (kPageTokens * (head_dim + dim + kWeightRows) + rows * (2 * dim + 2));
    const int64_t matrices = 2 * kPageTokens * (inner + dim) + kWeightRows * (6 * kPageTokens + 4 * dim) +
                             2 * (rows + kWeightRows) * inner + 4 * rows * (dim + 2);
    return vectors > matrices ? vectors : matrices;
}

// Invalid index that a kernel would follow out of the cache.
enum class SequenceFault : int { none = 0, cu_seqlens = 1, context = 2, columns = 3, page = 4 };

// Checks cu_seqlens, context and the pages to be read. t: number of tokens. pages: pages in the cache.
SequenceFault check_sequences(const PagedSequences& sequences, int64_t t, int64_t pages);
void paged_attention(const AttentionParams& params, int num_threads);
void write_kv(const KvParams& params, int num_threads);

#define APC_DECLARE(argument, name, ...)                                                          \
    namespace name {                                                                              \
    void attention_unit(const AttentionParams& params, const AttentionUnit& unit, char* scratch); \
    void write_kv_rows(const KvParams& params, int64_t begin, int64_t end);                       \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

}  // namespace apcbatch
