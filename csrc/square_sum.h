// RMS norm of a row: the sum of its squares, added in an order that does not depend on the vector width, and
// the row scaled by what follows from it.
//
// Invariant: the square of element i of a row is added to lane i mod 32. The 32 lanes are then added in a
// fixed tree.
#pragma once

#include "simd.h"

namespace apcbatch {
namespace APC_ISA {

constexpr int64_t kSumLanes = 32;
constexpr int kSumVecs = int(kSumLanes) / kLanes;

APC_INLINE float sum_lanes(const Vec (&sums)[kSumVecs]) {
    Vec sum[kSumVecs];
    for (int v = 0; v < kSumVecs; ++v) sum[v] = sums[v];
    for (int half = kSumVecs / 2; half > 0; half /= 2) {
        for (int v = 0; v < half; ++v) sum[v] = sum[v] + sum[v + half];
    }
    float lane[kLanes];
    sum[0].store(lane);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}

// Returns the sum of squares of a row of h values. value(at): the vector of values from index `at` on, with
// zeros after the row's end.
template <class Value>
APC_INLINE float square_sum_of(int64_t h, const Value& value) {
    Vec sums[kSumVecs];
    for (Vec& sum : sums) sum = Vec::zero();
    for (int64_t block = 0; block < h; block += kSumLanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kSumVecs; ++v) {
            const int64_t at = block + v * kLanes;
            if (at >= h) break;
            const Vec one = value(at);
            sums[v] = fma(one, one, sums[v]);
        }
    }
    return sum_lanes(sums);
}

template <class T>
APC_INLINE float square_sum(const T* x, int64_t h) {
    return square_sum_of(
        h, [&](int64_t at) __attribute__((always_inline)) { return load_first(x + at, h - at); });
}

// Writes x * factor * weight, without a weight x * factor.
template <class X, class Y>
APC_INLINE void normalise(const X* x, const float* weight, float factor, Y* y, int64_t h) {
    const Vec scale = Vec::broadcast(factor);
    for (int64_t at = 0; at < h; at += kLanes) {
        Vec value = load_first(x + at, h - at) * scale;
        if (weight) value = value * load_first(weight + at, h - at);
        store_first(value, y + at, h - at);
    }
}

}  // namespace APC_ISA
}  // namespace apcbatch
