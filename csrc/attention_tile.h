// Attention of one unit: some queries of one sequence, for the heads that share one kv head, over all their
// pages. Must not know: threads, how units are made.
//
// A row is one query of one head; rows lie by position, then head. Each page's keys are transposed and its
// values copied to scratch once, as float32, and every tile of rows of the unit uses them. A tile computes 64
// scores a row, turns them into weights, and adds the weighted values to the rows' outputs. Keys past a row's
// position are never read into it: the values beside the tile's common keys are added row by row.
#pragma once

#include "attention.h"
#include "lanes.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

constexpr int kLanes = Vec::lanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kPageVecs = int(kPageTokens) / kLanes;

struct Work {
    float* keys;     // (head_dim, kPageTokens): the page's keys, transposed
    float* values;   // (kPageTokens, dim)
    float* q;        // (rows, dim), scaled
    float* y;        // (rows, dim), running
    float* maximum;  // (rows)
    float* sum;      // (rows)
    float* weights;  // (kTileRows, kPageTokens): a tile's scores, then weights
    int64_t dim;     // padded_dim(head_dim)
};

// to[r, c] = chain over i < count of a[r, i] * b[i, c], from `factor[r]` * to[r, c] or from zero, for Rows
// rows and Vecs vectors of columns.
template <int Rows, int Vecs>
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t count,
              const float* factor, float* to, int64_t to_stride) {
    Vec acc[Rows][Vecs];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            acc[r][v] =
                factor ? Vec::load(to + r * to_stride + v * kLanes) * Vec::broadcast(factor[r]) : Vec::zero();
        }
    }
    for (int64_t i = 0; i < count; ++i, b += b_stride) {
        Vec w[Vecs];
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) w[v] = Vec::load(b + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
            const Vec x = Vec::broadcast(a[r * a_stride + i]);
#pragma GCC unroll 8
            for (int v = 0; v < Vecs; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) acc[r][v].store(to + r * to_stride + v * kLanes);
    }
}

// The same for all columns: `columns` is a multiple of 16.
template <int Rows>
void multiply_row_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t count,
                       const float* factor, float* to, int64_t to_stride, int64_t columns) {
    constexpr int wide = Rows == 1 ? kPageVecs : Rows <= 3 ? 4 : 2;
    constexpr int narrow = 16 / kLanes;
    int64_t c = 0;
    for (; c + wide * kLanes <= columns; c += wide * kLanes) {
        multiply<Rows, wide>(a, a_stride, b + c, b_stride, count, factor, to + c, to_stride);
    }
    for (; c < columns; c += narrow * kLanes) {
        multiply<Rows, narrow>(a, a_stride, b + c, b_stride, count, factor, to + c, to_stride);
    }
}

void multiply_rows(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                   int64_t count, const float* factor, float* to, int64_t to_stride, int64_t columns) {
#define APC_ROWS(n) \
    case n:         \
        return multiply_row_tile<n>(a, a_stride, b, b_stride, count, factor, to, to_stride, columns);
    switch (rows) {
        APC_ROWS(1)
        APC_ROWS(2)
        APC_ROWS(3)
        APC_ROWS(4)
        APC_ROWS(5)
        APC_ROWS(6)
#if defined(__AVX512F__)
        APC_ROWS(7)
        APC_ROWS(8)
        APC_ROWS(9)
        APC_ROWS(10)
        APC_ROWS(11)
        APC_ROWS(12)
#endif
    }
#undef APC_ROWS
}

#if defined(__AVX2__)
APC_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
APC_INLINE __m256 load8(const BFloat16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// to[c, r] = from[r, c] for r, c < 8.
template <class T>
APC_INLINE void transpose8(const T* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m256 row[8], pair[8], quad[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) row[i] = load8(from + i * from_stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        pair[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
        pair[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            quad[4 * i + 2 * j] = _mm256_shuffle_ps(pair[4 * i + j], pair[4 * i + j + 2], 0x44);
            quad[4 * i + 2 * j + 1] = _mm256_shuffle_ps(pair[4 * i + j], pair[4 * i + j + 2], 0xee);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31));
    }
}
#endif

// Copies `count` keys (vectors of head_dim, `stride` apart) transposed; the columns after them keep what they
// held, and the scores made of those are never used.
template <class T>
void transpose_keys(const T* from, int64_t stride, int64_t count, int64_t head_dim, float* to) {
    int64_t key = 0;
#if defined(__AVX2__)
    for (; key + 8 <= count; key += 8) {
        int64_t d = 0;
        for (; d + 8 <= head_dim; d += 8) {
            transpose8(from + key * stride + d, stride, to + d * kPageTokens + key, kPageTokens);
        }
        for (; d < head_dim; ++d) {
            for (int64_t i = key; i < key + 8; ++i) to[d * kPageTokens + i] = to_float(from[i * stride + d]);
        }
    }
#endif
    for (; key < count; ++key) {
        for (int64_t d = 0; d < head_dim; ++d) to[d * kPageTokens + key] = to_float(from[key * stride + d]);
    }
}

// Vectors of head_dim, `from_stride` apart, to rows of `dim` floats, times `scale`, padded with zeros.
template <class T>
void copy_vectors(const T* from, int64_t from_stride, int64_t count, int64_t head_dim, Vec scale, float* to,
                  int64_t dim) {
    for (int64_t r = 0; r < count; ++r) {
        for (int64_t d = 0; d < dim; d += kLanes) {
            const int64_t left = head_dim - d;
            const Vec value = left > 0 ? load_first(from + r * from_stride + d, left) * scale : Vec::zero();
            value.store(to + r * dim + d);
        }
    }
}

// Adds 16 lanes as a fixed tree.
APC_INLINE float add_lanes(const Vec (&sums)[16 / kLanes]) {
    float lane[16];
    for (int v = 0; v < 16 / kLanes; ++v) sums[v].store(lane + v * kLanes);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}

APC_INLINE float largest_lane(Vec a) {
    float lane[kLanes];
    a.store(lane);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    }
    return lane[0];
}

// A row's scores become exp(score - running maximum); those from `count` on become zero. Returns their sum.
APC_INLINE float weigh(float* scores, int64_t count, float* maximum) {
    for (int64_t i = count; i < kPageTokens; ++i) scores[i] = -__builtin_inff();
    Vec best = Vec::broadcast(*maximum);
#pragma GCC unroll 8
    for (int v = 0; v < kPageVecs; ++v) best = max(best, Vec::load(scores + v * kLanes));
    *maximum = largest_lane(best);
    const Vec base = Vec::broadcast(*maximum);
    Vec sums[16 / kLanes];
    for (Vec& sum : sums) sum = Vec::zero();
#pragma GCC unroll 8
    for (int v = 0; v < kPageVecs; ++v) {
        const Vec weight = exp(Vec::load(scores + v * kLanes) - base);
        weight.store(scores + v * kLanes);
        sums[v % (16 / kLanes)] = sums[v % (16 / kLanes)] + weight;
    }
    return add_lanes(sums);
}

// One page for the rows [row, row + rows), which see counts[r] of its keys each.
void attend_tile(const Work& work, int64_t head_dim, int64_t row, int64_t rows, const int64_t* counts) {
    multiply_rows(rows, work.q + row * work.dim, work.dim, work.keys, kPageTokens, head_dim, nullptr,
                  work.weights, kPageTokens, kPageTokens);
    float before[16] = {}, factor[16], page_sum[kTileRows];
    for (int64_t r = 0; r < rows; ++r) {
        before[r] = work.maximum[row + r];
        page_sum[r] = weigh(work.weights + r * kPageTokens, counts[r], work.maximum + row + r);
        before[r] -= work.maximum[row + r];
    }
    for (int64_t r = 0; r < rows; r += kLanes) exp(Vec::load(before + r)).store(factor + r);
    int64_t common = kPageTokens;
    for (int64_t r = 0; r < rows; ++r) {
        work.sum[row + r] = work.sum[row + r] * factor[r] + page_sum[r];
        if (counts[r] < common) common = counts[r];
    }
    multiply_rows(rows, work.weights, kPageTokens, work.values, work.dim, common, factor,
                  work.y + row * work.dim, work.dim, work.dim);
    const float one = 1.0f;
    for (int64_t r = 0; r < rows; ++r) {
        if (counts[r] == common) continue;
        multiply_rows(1, work.weights + r * kPageTokens + common, kPageTokens,
                      work.values + common * work.dim, work.dim, counts[r] - common, &one,
                      work.y + (row + r) * work.dim, work.dim, work.dim);
    }
}

template <class Cache>
void load_page(const AttentionParams& p, const Work& work, int64_t page, int64_t kv_head, int64_t count) {
    const int64_t stride = p.kv_heads * p.head_dim;
    const int64_t at = page * kPageTokens * stride + kv_head * p.head_dim;
    transpose_keys(static_cast<const Cache*>(p.k_cache) + at, stride, count, p.head_dim, work.keys);
    copy_vectors(static_cast<const Cache*>(p.v_cache) + at, stride, count, p.head_dim, Vec::broadcast(1.0f),
                 work.values, work.dim);
}

template <class Q>
void load_queries(const AttentionParams& p, const AttentionUnit& unit, const Work& work) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t first = p.cu_seqlens[unit.sequence] + unit.begin;
    for (int64_t i = 0; i < unit.end - unit.begin; ++i) {
        const Q* q =
            static_cast<const Q*>(p.q) + (first + i) * p.q_stride + unit.kv_head * group * p.head_dim;
        copy_vectors(q, p.head_dim, group, p.head_dim, Vec::broadcast(p.scale), work.q + i * group * work.dim,
                     work.dim);
    }
}

template <class Out>
void store_rows(const AttentionParams& p, const AttentionUnit& unit, const Work& work) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t first = p.cu_seqlens[unit.sequence] + unit.begin;
    for (int64_t r = 0; r < (unit.end - unit.begin) * group; ++r) {
        const int64_t head = unit.kv_head * group + r % group;
        Out* out = static_cast<Out*>(p.out) + ((first + r / group) * p.heads + head) * p.head_dim;
        const Vec sum = Vec::broadcast(work.sum[r]);
        for (int64_t d = 0; d < p.head_dim; d += kLanes) {
            store_first(Vec::load(work.y + r * work.dim + d) / sum, out + d, p.head_dim - d);
        }
    }
}

Work cut_scratch(const AttentionParams& p, int64_t rows, char* scratch) {
    Work work;
    work.dim = padded_dim(p.head_dim);
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

}  // namespace

void attention_unit(const AttentionParams& p, const AttentionUnit& unit, char* scratch) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t rows = (unit.end - unit.begin) * group;
    const Work work = cut_scratch(p, rows, scratch);
    if (p.q_dtype == DType::float32) {
        load_queries<float>(p, unit, work);
    } else {
        load_queries<BFloat16>(p, unit, work);
    }
    const int64_t first_position = p.context[unit.sequence] + unit.begin;
    const int64_t length = p.context[unit.sequence] + unit.end;  // keys that the last query sees
    const int64_t* pages = p.page_table + unit.sequence * p.page_table_stride;
    for (int64_t key = 0; key < length; key += kPageTokens) {
        const int64_t count = length - key < kPageTokens ? length - key : kPageTokens;
        if (p.cache_dtype == DType::float32) {
            load_page<float>(p, work, pages[key / kPageTokens], unit.kv_head, count);
        } else {
            load_page<BFloat16>(p, work, pages[key / kPageTokens], unit.kv_head, count);
        }
        for (int64_t row = 0; row < rows; row += kTileRows) {
            const int64_t size = rows - row < kTileRows ? rows - row : kTileRows;
            int64_t counts[kTileRows];
            for (int64_t r = 0; r < size; ++r) {
                const int64_t seen = first_position + (row + r) / group + 1 - key;
                counts[r] = seen < 0 ? 0 : seen < kPageTokens ? seen : kPageTokens;
            }
            if (counts[size - 1] > 0) attend_tile(work, p.head_dim, row, size, counts);
        }
    }
    if (p.q_dtype == DType::float32) {
        store_rows<float>(p, unit, work);
    } else {
        store_rows<BFloat16>(p, unit, work);
    }
}

namespace {

template <class From, class To>
void write_kv_typed(const KvParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const From* from[2] = {static_cast<const From*>(p.k) + r * p.k_stride,
                               static_cast<const From*>(p.v) + r * p.v_stride};
        To* to[2] = {static_cast<To*>(p.k_cache) + p.token_slots[r] * p.row,
                     static_cast<To*>(p.v_cache) + p.token_slots[r] * p.row};
        for (int half = 0; half < 2; ++half) {
            for (int64_t i = 0; i < p.row; i += kLanes) {
                store_first(load_first(from[half] + i, p.row - i), to[half] + i, p.row - i);
            }
        }
    }
}

}  // namespace

void write_kv_rows(const KvParams& p, int64_t begin, int64_t end) {
    const bool wide = p.cache_dtype == DType::float32;
    if (p.dtype == DType::float32) {
        return wide ? write_kv_typed<float, float>(p, begin, end)
                    : write_kv_typed<float, BFloat16>(p, begin, end);
    }
    return wide ? write_kv_typed<BFloat16, float>(p, begin, end)
                : write_kv_typed<BFloat16, BFloat16>(p, begin, end);
}

}  // namespace APC_ISA
}  // namespace apcbatch
