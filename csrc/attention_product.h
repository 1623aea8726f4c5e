// The two small matrix products of attention, in register tiles: scores = q k^T and output += weights v.
#pragma once

#include "simd.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// Rows of the largest register tile.
#if defined(__AVX512F__)
constexpr int kQueryRows = 12;
#else
constexpr int kQueryRows = 6;
#endif

// Computes to[r, c] = factor[r] * to[r, c] + sum over i < count of a[r, i] * b[i, c]: one chain of fused
// multiply-adds, i ascending. A null factor begins the chain at zero. Strides are in elements. columns: a
// multiple of 16.
template <class B>
struct Product {
    const float* a;
    int64_t a_stride;
    const B* b;
    int64_t b_stride;
    int64_t count;
    const float* factor;
    float* to;
    int64_t to_stride;
    int64_t columns;
};

// Computes a tile of Rows rows and Vecs vectors of columns, beginning at `column`.
template <int Rows, int Vecs, class B>
void multiply(const Product<B>& p, int64_t column) {
    const float* a = p.a;
    const B* b = p.b + column;
    float* to = p.to + column;
    const int64_t a_stride = p.a_stride, b_stride = p.b_stride, to_stride = p.to_stride, count = p.count;
    Vec acc[Rows][Vecs];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < Vecs; ++v) {
            acc[r][v] = Vec::zero();
            if (p.factor)
                acc[r][v] = Vec::load(to + r * to_stride + v * kLanes) * Vec::broadcast(p.factor[r]);
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

// Computes all columns of Rows rows. With few rows a tile has more vectors, for enough independent chains.
template <int Rows, class B>
void multiply_columns(const Product<B>& p) {
    constexpr int wide = Rows == 1 ? 64 / kLanes : Rows <= 3 ? 4 : 2;
    constexpr int narrow = 16 / kLanes;
    int64_t c = 0;
    for (; c + wide * kLanes <= p.columns; c += wide * kLanes) multiply<Rows, wide>(p, c);
    for (; c < p.columns; c += narrow * kLanes) multiply<Rows, narrow>(p, c);
}

template <class B>
void multiply_rows(int64_t rows, const Product<B>& p) {
    with_number<kQueryRows>(rows, [&](auto count) { multiply_columns<decltype(count)::value>(p); });
}

}  // namespace
}  // namespace APC_ISA
}  // namespace apcbatch
