// Copy or transpose a page's keys and values into the layout that the products of attention read.
#pragma once

#include "attention.h"
#include "attention_product.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

#if defined(__AVX2__)
APC_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
APC_INLINE __m256 load8(const BFloat16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Transposes 8 by 8 elements: to[c, r] = from[r, c].
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

// Prefetches one vector of head_dim of the next page. The rows of the KV cache lie too far apart for the
// hardware prefetcher.
template <class T>
APC_INLINE void prefetch(const T* p, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += int64_t(64 / sizeof(T))) __builtin_prefetch(p + d, 0, 2);
}

// Copies `count` keys (vectors of head_dim, `stride` apart) transposed. Columns past `count` keep their old
// content; the scores made of them are never used. next: keys of the next page, to prefetch, or null.
template <class T>
void transpose_keys(const T* from, const T* next, int64_t stride, int64_t count, int64_t head_dim,
                    float* to) {
    for (int64_t key = 0; key < count; key += 8) {
        const int64_t end = key + 8 < count ? key + 8 : count;
        for (int64_t i = key; next && i < end; ++i) prefetch(next + i * stride, head_dim);
        int64_t d = 0;
#if defined(__AVX2__)
        for (; end == key + 8 && d + 8 <= head_dim; d += 8) {
            transpose8(from + key * stride + d, stride, to + d * kPageTokens + key, kPageTokens);
        }
#endif
        for (; d < head_dim; ++d) {
            for (int64_t i = key; i < end; ++i) to[d * kPageTokens + i] = to_float(from[i * stride + d]);
        }
    }
}

// Copies `count` vectors of head_dim, `stride` apart, to rows of `dim` floats, multiplied by `scale` and
// padded with zeros.
template <class T>
void copy_vectors(const T* from, int64_t stride, int64_t count, int64_t head_dim, float scale, float* to,
                  int64_t dim) {
    const Vec factor = Vec::broadcast(scale);
    for (int64_t r = 0; r < count; ++r, from += stride, to += dim) {
        int64_t d = 0;
        for (; d + kLanes <= head_dim; d += kLanes) (Vec::load(from + d) * factor).store(to + d);
        if (d < head_dim) {
            (load_partial(from + d, head_dim - d) * factor).store(to + d);
            d += kLanes;
        }
        for (; d < dim; d += kLanes) Vec::zero().store(to + d);
    }
}

// Prefetches `count` vectors of head_dim.
template <class T>
void prefetch_vectors(const T* from, int64_t stride, int64_t count, int64_t head_dim) {
    for (int64_t r = 0; r < count; ++r) prefetch(from + r * stride, head_dim);
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch
