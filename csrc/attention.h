// Attention over a paged KV cache: arguments and entry points; attention_tile.h holds the arithmetic.
//
// Arithmetic of one query (one head of one token) at absolute position p. Page by page, ascending, over the
// keys [64 i, min(64 i + 64, p + 1)): scores by a chain of fused multiply-adds over head_dim, the page's
// maximum, then the running maximum, sum and output rescaled once a page (Milakov and Gimelshein 2018, online
// softmax). So its bits depend on the position and on the keys before it, never on the piece or the batch
// that it comes in.
#pragma once

#include <stdint.h>

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

constexpr int64_t kPageTokens = 64;

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
    const int64_t* context = nullptr;     // (b): tokens cached before this piece
    void* out = nullptr;                  // (t, heads, head_dim) contiguous, q's dtype
};

// Queries [begin, end) of one sequence's piece, for the heads of one kv head.
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

// Rows (a query of one head each) of a unit at most, for pieces of more than one token.
constexpr int64_t kUnitRows = 96;

// Floats of a cached vector, of an output row: head_dim rounded up to whole tiles.
constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

constexpr int64_t kWeightRows = 16;  // at least any instruction set's rows of a tile

// Scratch of a unit: keys, values, a tile's weights; queries, outputs, maxima and sums of its rows. The
// second term is that of attention_amx.h, which also has a tile's scores and outputs, and whole tiles of
// queries.
constexpr int64_t attention_scratch_bytes(int64_t head_dim, int64_t rows) {
    const int64_t dim = padded_dim(head_dim), inner = (head_dim + 31) / 32 * 32;
    const int64_t vectors = 4 * (kPageTokens * (head_dim + dim + kWeightRows) + rows * (2 * dim + 2));
    const int64_t matrices = 2 * kPageTokens * (inner + dim) + kWeightRows * (6 * kPageTokens + 4 * dim) +
                             2 * (rows + kWeightRows) * inner + 4 * rows * (dim + 2);
    return vectors > matrices ? vectors : matrices;
}

// What is wrong with the numbers that a kernel follows into the cache.
enum class SequenceFault : int { none = 0, cu_seqlens = 1, context = 2, columns = 3, page = 4 };

// Checks cu_seqlens, context and the pages that would be read: t tokens in all, `pages` pages, `columns` in
// page_table.
SequenceFault check_sequences(const AttentionParams& params, int64_t t, int64_t pages, int64_t columns);
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
