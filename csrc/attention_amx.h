// Attention of one unit in AMX tile registers, for bfloat16 queries and cache.
//
// Arithmetic: that of attention.h, with three differences. Sums over head_dim and over keys are those of
// gemm_amx.h, in steps of 32 that begin at multiples of 32. Scores are scaled after their sum. Weights are
// rounded to bfloat16 before they multiply the values. A register has 16 independent rows, each a query of
// one head. Keys past a row's position have weight zero, but zero times NaN or infinity is NaN. So a page
// with values that are not finite is multiplied row by row, with zeros in place of the values past the row's
// position.
#pragma once

#include "attention_page.h"
#include "attention_weights.h"
#include "gemm_amx.h"

#if defined(__AMX_BF16__)

namespace apcbatch {
namespace APC_ISA {
namespace {

constexpr int64_t kKeyTiles = kPageTokens / 16;        // registers side by side for a page's keys
constexpr int64_t kValueSteps = kPageTokens / kTileK;  // steps over a page's keys
constexpr int64_t kWeightBytes = 2 * kPageTokens;      // a row of weights
constexpr int64_t kScoreBytes = 4 * kPageTokens;       // a row of scores

// Rows and scratch of a unit. inner: head_dim rounded up to whole steps. dim: head_dim rounded up to the
// columns of a register.
struct MatrixWork {
    int64_t head_dim, inner, dim;
    float scale;
    char* q;         // (rows + 15, inner) bfloat16
    char* keys;      // (inner / 32, kKeyTiles) registers
    char* values;    // (kValueSteps, dim / 16) registers
    char* weights;   // (16, kPageTokens) bfloat16
    float* scores;   // (16, kPageTokens)
    float* y;        // (rows, dim), running outputs
    float* few;      // (16, dim): y of the last rows, if they are fewer than 16
    float* maximum;  // (rows)
    float* sum;      // (rows)
};

MatrixWork cut_matrix_scratch(const AttentionParams& p, int64_t rows, char* scratch) {
    MatrixWork work{};
    work.head_dim = p.head_dim;
    work.inner = packed_k(p.head_dim, 2);
    work.dim = padded_dim(p.head_dim);
    work.scale = p.scale;
    const auto take = [&](int64_t bytes) {
        char* part = scratch;
        scratch += bytes;
        return part;
    };
    work.keys = take(2 * kPageTokens * work.inner);
    work.values = take(2 * kPageTokens * work.dim);
    work.weights = take(kRegisterRows * kWeightBytes);
    work.scores = reinterpret_cast<float*>(take(kRegisterRows * kScoreBytes));
    work.few = reinterpret_cast<float*>(take(4 * kRegisterRows * work.dim));
    work.y = reinterpret_cast<float*>(take(4 * rows * work.dim));
    work.q = take(2 * (rows + kRegisterRows - 1) * work.inner);
    work.maximum = reinterpret_cast<float*>(take(4 * rows));
    work.sum = reinterpret_cast<float*>(take(4 * rows));
    memset(work.keys, 0, size_t(2 * kPageTokens * work.inner));
    memset(work.y, 0, size_t(4 * rows * work.dim));
    for (int64_t r = 0; r < rows; ++r) {
        work.maximum[r] = -__builtin_inff();
        work.sum[r] = 0.0f;
    }
    return work;
}

// Copies `count` keys (vectors of head_dim, `stride` apart) to registers, laid out as pairs of head_dim by
// keys. Columns past `count` keep their old content; the scores made of them are never used.
void copy_keys(const BFloat16* from, const BFloat16* next, int64_t stride, int64_t count,
               const MatrixWork& work) {
    const auto place = [&](int64_t key, int64_t pair) {
        const int64_t tile = pair / 16 * kKeyTiles + key / 16;
        return work.keys + tile * kRegisterBytes + pair % 16 * 64 + key % 16 * 4;
    };
    const int64_t pairs = stride % 2 == 0 ? work.head_dim / 2 : 0;
    for (int64_t key = 0; key < count; key += 8) {
        const int64_t end = key + 8 < count ? key + 8 : count;
        for (int64_t i = key; next && i < end; ++i) prefetch(next + i * stride, work.head_dim);
        int64_t pair = 0;
        for (; end == key + 8 && pair + 8 <= pairs; pair += 8) {
            transpose8(reinterpret_cast<const float*>(from + key * stride) + pair, stride / 2,
                       reinterpret_cast<float*>(place(key, pair)), 16);
        }
        for (int64_t d = 2 * pair; d < work.head_dim; ++d) {
            for (int64_t i = key; i < end; ++i) memcpy(place(i, d / 2) + d % 2 * 2, from + i * stride + d, 2);
        }
    }
}

// Copies `count` values to registers, laid out as pairs of keys by head_dim and padded with zeros. Returns
// false if a value is not finite.
bool copy_values(const BFloat16* from, int64_t stride, int64_t count, const MatrixWork& work) {
    const __m256i exponent = _mm256_set1_epi16(0x7f80);
    unsigned wild = 0;
    const auto load = [&](int64_t key, int64_t d) {
        const int64_t left = key >= count ? 0 : work.head_dim - d < 16 ? work.head_dim - d : 16;
        const __m256i value = _mm256_maskz_loadu_epi16(__mmask16((1u << left) - 1), from + key * stride + d);
        wild |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(value, exponent), exponent);
        return _mm512_cvtepu16_epi32(value);
    };
    for (int64_t key = 0; key < kPageTokens; key += 2) {
        char* to = work.values + key / kTileK * work.dim / 16 * kRegisterBytes + key % kTileK / 2 * 64;
        for (int64_t d = 0; d < work.dim; d += 16, to += kRegisterBytes) {
            _mm512_storeu_si512(to, _mm512_or_si512(load(key, d), _mm512_slli_epi32(load(key + 1, d), 16)));
        }
    }
    return wild == 0;
}

// Computes scores = q k^T for 16 rows of q.
void multiply_keys(const MatrixWork& work, const char* q) {
    memory_is_written();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char* keys = work.keys;
    for (int64_t d = 0; d < work.inner; d += kTileK, q += 2 * kTileK, keys += kKeyTiles * kRegisterBytes) {
        _tile_loadd(4, q, 2 * work.inner);
        _tile_loadd(5, keys, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + kRegisterBytes, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, keys + 2 * kRegisterBytes, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, keys + 3 * kRegisterBytes, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, work.scores, kScoreBytes);
    _tile_stored(1, work.scores + 16, kScoreBytes);
    _tile_stored(2, work.scores + 32, kScoreBytes);
    _tile_stored(3, work.scores + 48, kScoreBytes);
}

// Computes y += weights v for 16 rows of y.
void multiply_values(const MatrixWork& work, float* y) {
    static_assert(kValueSteps == 2, "a register for each step's weights");
    const int64_t row = 4 * work.dim, step = work.dim / 16 * kRegisterBytes;
    const char* values = work.values;
    memory_is_written();
    _tile_loadd(4, work.weights, kWeightBytes);
    _tile_loadd(5, work.weights + 2 * kTileK, kWeightBytes);
    for (int64_t d = 0; d < work.dim; d += 16, values += kRegisterBytes) {
        _tile_loadd(0, y + d, row);
        _tile_loadd(6, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values + step, 64);
        _tile_dpbf16ps(0, 5, 7);
        _tile_stored(0, y + d, row);
    }
}

// Processes one page for at most 16 rows [row, row + rows). Row r sees the first counts[r] keys of the page.
void attend_register(const MatrixWork& work, int64_t row, int64_t rows, const int64_t* counts) {
    multiply_keys(work, work.q + 2 * row * work.inner);
    const Vec scale = Vec::broadcast(work.scale);
    float before[kRegisterRows] = {}, factor[kRegisterRows], page_sum[kRegisterRows];
    for (int64_t r = 0; r < rows; ++r) {
        float* scores = work.scores + r * kPageTokens;
        for (int64_t i = 0; i < kPageTokens; i += kLanes) (Vec::load(scores + i) * scale).store(scores + i);
        before[r] = work.maximum[row + r];
        page_sum[r] = weigh(scores, counts[r], work.maximum + row + r);
        before[r] -= work.maximum[row + r];
        BFloat16* weights = reinterpret_cast<BFloat16*>(work.weights + r * kWeightBytes);
        for (int64_t i = 0; i < kPageTokens; i += kLanes) Vec::load(scores + i).store(weights + i);
    }
    static_assert(kRegisterRows == kLanes, "one vector holds a register's factors");
    exp(Vec::load(before)).store(factor);
    float* const rows_y = work.y + row * work.dim;
    float* const y = rows == kRegisterRows ? rows_y : work.few;
    for (int64_t r = 0; r < rows; ++r) {
        work.sum[row + r] = work.sum[row + r] * factor[r] + page_sum[r];
        const Vec by = Vec::broadcast(factor[r]);
        for (int64_t d = r * work.dim; d < (r + 1) * work.dim; d += kLanes)
            (Vec::load(rows_y + d) * by).store(y + d);
    }
    multiply_values(work, y);
    if (y != rows_y) memcpy(rows_y, y, size_t(4 * rows * work.dim));
}

// Processes the page that begins at position `key` and has `count` keys, for all rows of the unit.
void attend_matrix_page(const MatrixWork& work, const BFloat16* values, int64_t key, int64_t count,
                        const UnitRows& rows) {
    const int64_t stride = rows.stride;
    const bool finite = copy_values(values, stride, count, work);
    for (int64_t row = 0; row < rows.count; row += kRegisterRows) {
        const int64_t size = rows.count - row < kRegisterRows ? rows.count - row : kRegisterRows;
        int64_t counts[kRegisterRows] = {};
        for (int64_t r = 0; r < size; ++r) counts[r] = rows.seen(row + r, key);
        if (finite) {
            if (counts[size - 1] > 0) attend_register(work, row, size, counts);
            continue;
        }
        for (int64_t r = 0; r < size; ++r) {
            if (counts[r] == 0) continue;
            copy_values(values, stride, counts[r], work);
            attend_register(work, row + r, 1, counts + r);
        }
    }
}

void load_matrix_queries(const AttentionParams& p, const AttentionUnit& unit, const MatrixWork& work) {
    const int64_t group = p.heads / p.kv_heads;
    const int64_t first = p.cu_seqlens[unit.sequence] + unit.begin;
    char* to = work.q;
    for (int64_t i = 0; i < unit.end - unit.begin; ++i) {
        const BFloat16* q =
            static_cast<const BFloat16*>(p.q) + (first + i) * p.q_stride + unit.kv_head * group * p.head_dim;
        for (int64_t h = 0; h < group; ++h, q += p.head_dim, to += 2 * work.inner) {
            memcpy(to, q, size_t(2 * p.head_dim));
            memset(to + 2 * p.head_dim, 0, size_t(2 * (work.inner - p.head_dim)));
        }
    }
}

// Processes all pages of the unit, prefetching the next page during each.
void attend_matrix(const AttentionParams& p, const AttentionUnit& unit, const MatrixWork& work) {
    const Registers<Mode::kMatrix> registers;
    const UnitRows rows(p, unit);
    const int64_t length = rows.length, stride = rows.stride;
    const int64_t* pages = rows.pages;
    const auto at = [&](const void* cache, int64_t page) {
        return static_cast<const BFloat16*>(cache) + page * kPageTokens * stride + unit.kv_head * p.head_dim;
    };
    load_matrix_queries(p, unit, work);
    for (int64_t key = 0; key < length; key += kPageTokens, ++pages) {
        const int64_t count = length - key < kPageTokens ? length - key : kPageTokens;
        const bool more = key + kPageTokens < length;
        copy_keys(at(p.k_cache, pages[0]), more ? at(p.k_cache, pages[1]) : nullptr, stride, count, work);
        if (more) prefetch_vectors(at(p.v_cache, pages[1]), stride, count, p.head_dim);
        attend_matrix_page(work, at(p.v_cache, pages[0]), key, count, rows);
    }
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch

#endif
