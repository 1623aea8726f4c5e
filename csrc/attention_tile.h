// Attention of one unit: some queries of one sequence, for the heads that share one kv head, over all their
// pages.
//
// A row is one query of one head. Rows are ordered by position, then head. Each page's keys are transposed
// and its values copied to scratch once, as float32, for all tiles of rows of the unit. A tile computes 64
// scores per row, converts them to weights, and adds the weighted values to the rows' outputs. Keys past a
// row's position never enter its result: values of keys that only some rows of the tile see are added row by
// row.
#pragma once

#include "attention_amx.h"
#include "attention_page.h"
#include "attention_weights.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// Rows and scratch of a unit. dim: padded_dim(head_dim).
struct Work {
    int64_t dim, head_dim;
    float* keys;     // (head_dim, kPageTokens): the page's keys, transposed
    float* values;   // (kPageTokens, dim): copy of the page's values, unless they are read in place
    float* weights;  // (kQueryRows, kPageTokens): a tile's scores, then weights
    float* q;        // (rows, dim), scaled queries
    float* y;        // (rows, dim), running outputs
    float* maximum;  // (rows)
    float* sum;      // (rows)
};

// Values of a page, as the tiles read them.
template <class V>
struct Values {
    const V* v;
    int64_t stride;
};

// Processes one page for the rows [row, row + rows). Row r sees the first counts[r] keys of the page.
template <class V>
void attend_tile(const Work& work, const Values<V>& values, int64_t row, int64_t rows,
                 const int64_t* counts) {
    multiply_rows(rows, Product<float>{work.q + row * work.dim, work.dim, work.keys, kPageTokens,
                                       work.head_dim, nullptr, work.weights, kPageTokens, kPageTokens});
    static_assert(kQueryRows <= 16 && 16 % kLanes == 0, "whole vectors hold a tile's rows");
    float before[16] = {}, factor[16], page_sum[kQueryRows];
    int64_t common = kPageTokens;
    for (int64_t r = 0; r < rows; ++r) {
        before[r] = work.maximum[row + r];
        page_sum[r] = weigh(work.weights + r * kPageTokens, counts[r], work.maximum + row + r);
        before[r] -= work.maximum[row + r];
        if (counts[r] < common) common = counts[r];
    }
    for (int64_t r = 0; r < rows; r += kLanes) exp(Vec::load(before + r)).store(factor + r);
    for (int64_t r = 0; r < rows; ++r) work.sum[row + r] = work.sum[row + r] * factor[r] + page_sum[r];
    Product<V> product{
        work.weights, kPageTokens, values.v, values.stride, common, factor, work.y + row * work.dim,
        work.dim,     work.dim};
    multiply_rows(rows, product);
    const float one = 1.0f;
    product.b += common * values.stride;
    product.factor = &one;
    for (int64_t r = 0; r < rows; ++r) {
        if (counts[r] == common) continue;
        product.a = work.weights + r * kPageTokens + common;
        product.count = counts[r] - common;
        product.to = work.y + (row + r) * work.dim;
        multiply_rows(1, product);
    }
}

// Processes the page that begins at position `key`, for all rows of the unit.
template <class V>
void attend_page(const Work& work, const Values<V>& values, int64_t key, const UnitRows& rows) {
    for (int64_t row = 0; row < rows.count; row += kQueryRows) {
        const int64_t size = rows.count - row < kQueryRows ? rows.count - row : kQueryRows;
        int64_t counts[kQueryRows];
        for (int64_t r = 0; r < size; ++r) counts[r] = rows.seen(row + r, key);
        if (counts[size - 1] > 0) attend_tile(work, values, row, size, counts);
    }
}

// Processes all pages of the unit, prefetching the next page during each. If the unit has one tile of rows,
// it reads values in place; for more tiles a copy is faster.
template <class Cache>
void attend_pages(const AttentionParams& p, const AttentionUnit& unit, const Work& work) {
    const UnitRows rows(p, unit);
    const int64_t length = rows.length, stride = rows.stride;
    const int64_t* pages = rows.pages;
    const bool in_place = rows.count <= kQueryRows && work.dim == p.head_dim;
    for (int64_t key = 0; key < length; key += kPageTokens, ++pages) {
        const int64_t count = length - key < kPageTokens ? length - key : kPageTokens;
        const bool more = key + kPageTokens < length;
        const int64_t head = unit.kv_head * p.head_dim;
        const int64_t at = pages[0] * kPageTokens * stride + head;
        const int64_t next = (more ? pages[1] : 0) * kPageTokens * stride + head;
        const Cache* k = static_cast<const Cache*>(p.k_cache);
        const Cache* v = static_cast<const Cache*>(p.v_cache);
        transpose_keys(k + at, more ? k + next : nullptr, stride, count, p.head_dim, work.keys);
        if (more) prefetch_vectors(v + next, stride, count, p.head_dim);
        if (in_place) {
            attend_page(work, Values<Cache>{v + at, stride}, key, rows);
        } else {
            copy_vectors(v + at, stride, count, p.head_dim, 1.0f, work.values, work.dim);
            attend_page(work, Values<float>{work.values, work.dim}, key, rows);
        }
    }
}

template <class Q>
void load_queries(const AttentionParams& p, const AttentionUnit& unit, const Work& work) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t first = p.cu_seqlens[unit.sequence] + unit.begin;
    for (int64_t i = 0; i < unit.end - unit.begin; ++i) {
        const Q* q =
            static_cast<const Q*>(p.q) + (first + i) * p.q_stride + unit.kv_head * group * p.head_dim;
        copy_vectors(q, p.head_dim, group, p.head_dim, p.scale, work.q + i * group * work.dim, work.dim);
    }
}

// Divides y (rows, dim) by the rows' sums of weights and writes the output.
template <class Out>
void store_rows(const AttentionParams& p, const AttentionUnit& unit, const float* y, int64_t dim,
                const float* sums) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t first = p.cu_seqlens[unit.sequence] + unit.begin;
    for (int64_t r = 0; r < (unit.end - unit.begin) * group; ++r) {
        const int64_t head = unit.kv_head * group + r % group;
        Out* out = static_cast<Out*>(p.out) + ((first + r / group) * p.heads + head) * p.head_dim;
        const Vec sum = Vec::broadcast(sums[r]);
        for (int64_t d = 0; d < p.head_dim; d += kLanes) {
            store_first(Vec::load(y + r * dim + d) / sum, out + d, p.head_dim - d);
        }
    }
}

Work cut_scratch(const AttentionParams& p, int64_t rows, char* scratch) {
    Work work{};
    work.dim = padded_dim(p.head_dim);
    work.head_dim = p.head_dim;
    work.keys = reinterpret_cast<float*>(scratch);
    work.values = work.keys + p.head_dim * kPageTokens;
    work.weights = work.values + kPageTokens * work.dim;
    work.q = work.weights + kWeightRows * kPageTokens;
    work.y = work.q + rows * work.dim;
    work.maximum = work.y + rows * work.dim;
    work.sum = work.maximum + rows;
    for (int64_t i = 0; i < rows * work.dim; ++i) work.y[i] = 0.0f;
    for (int64_t r = 0; r < rows; ++r) {
        work.maximum[r] = -__builtin_inff();
        work.sum[r] = 0.0f;
    }
    return work;
}

template <class Q>
void attend(const AttentionParams& p, const AttentionUnit& unit, const Work& work) {
    load_queries<Q>(p, unit, work);
    with_type(p.cache_dtype, [&](auto k) { attend_pages<TypeOf<decltype(k)>>(p, unit, work); });
    store_rows<Q>(p, unit, work.y, work.dim, work.sum);
}

}  // namespace

void attention_unit(const AttentionParams& p, const AttentionUnit& unit, char* scratch) {
    const int64_t rows = (unit.end - unit.begin) * (p.heads / p.kv_heads);
#if defined(__AMX_BF16__)
    if (p.q_dtype == DType::bfloat16 && p.cache_dtype == DType::bfloat16) {
        const MatrixWork work = cut_matrix_scratch(p, rows, scratch);
        attend_matrix(p, unit, work);
        return store_rows<BFloat16>(p, unit, work.y, work.dim, work.sum);
    }
#endif
    const Work work = cut_scratch(p, rows, scratch);
    with_type(p.q_dtype, [&](auto q) { attend<TypeOf<decltype(q)>>(p, unit, work); });
}

namespace {

template <class From, class To>
void write_kv_typed(const KvParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const From* from[2] = {static_cast<const From*>(p.k) + r * p.k_stride,
                               static_cast<const From*>(p.v) + r * p.v_stride};
        To* to[2] = {static_cast<To*>(p.k_cache) + p.token_slots[r] * p.row,
                     static_cast<To*>(p.v_cache) + p.token_slots[r] * p.row};
        for (int half = 0; half < 2; ++half) convert_row(from[half], to[half], p.row);
    }
}

}  // namespace

void write_kv_rows(const KvParams& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto k) {
        with_type(p.cache_dtype, [&](auto cache) {
            write_kv_typed<TypeOf<decltype(k)>, TypeOf<decltype(cache)>>(p, begin, end);
        });
    });
}

}  // namespace APC_ISA
}  // namespace apcbatch
