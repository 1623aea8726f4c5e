// RMS norm (Zhang and Sennrich 2019, equation 4), alone or after the residual addition, and silu(gate) * up.
//
// Invariant: the square of element i of a row is added to lane i mod 32. The 32 lanes are then added in a
// fixed tree, for any vector width.
#pragma once

#include "lanes.h"
#include "rowwise.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

constexpr int64_t kSumLanes = 32;
constexpr int kSumVecs = int(kSumLanes) / kLanes;

APC_INLINE float sum_lanes(const Vec (&sums)[kSumVecs]) {
    float lane[kSumLanes];
    for (int v = 0; v < kSumVecs; ++v) sums[v].store(lane + v * kLanes);
    for (int64_t half = kSumLanes / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    return lane[0];
}

// Returns the sum of squares of a row. With a delta, first adds it to the row in place.
template <class X, class Delta>
APC_INLINE float square_sum(X* x, const Delta* delta, int64_t h) {
    Vec sums[kSumVecs];
    for (Vec& sum : sums) sum = Vec::zero();
    for (int64_t block = 0; block < h; block += kSumLanes) {
#pragma GCC unroll 4
        for (int v = 0; v < kSumVecs; ++v) {
            const int64_t at = block + v * kLanes;
            if (at >= h) break;
            Vec value = load_first(x + at, h - at);
            if (delta) {
                value = value + load_first(delta + at, h - at);
                store_first(value, x + at, h - at);
            }
            sums[v] = fma(value, value, sums[v]);
        }
    }
    return sum_lanes(sums);
}

template <class X, class Y>
APC_INLINE void normalise(const X* x, const float* weight, float factor, Y* y, int64_t h) {
    const Vec scale = Vec::broadcast(factor);
    for (int64_t at = 0; at < h; at += kLanes) {
        Vec value = load_first(x + at, h - at) * scale;
        if (weight) value = value * load_first(weight + at, h - at);
        store_first(value, y + at, h - at);
    }
}

template <class X, class Delta, class Y>
void rms_norm_typed(const NormParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        X* x = static_cast<X*>(p.x) + r * p.x_stride;
        const Delta* delta = p.delta ? static_cast<const Delta*>(p.delta) + r * p.delta_stride : nullptr;
        const float mean = square_sum(x, delta, p.h) / float(p.h);
        normalise(x, p.weight, 1.0f / __builtin_sqrtf(mean + p.eps), static_cast<Y*>(p.y) + r * p.h, p.h);
    }
}

template <class T>
void silu_mul_typed(const SiluMulParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(p.gate) + r * p.gate_stride;
        const T* up = static_cast<const T*>(p.up) + r * p.up_stride;
        T* y = static_cast<T*>(p.y) + r * p.y_stride;
        for (int64_t at = 0; at < p.f; at += kLanes) {
            const int64_t left = p.f - at;
            store_first(silu(load_first(gate + at, left)) * load_first(up + at, left), y + at, left);
        }
    }
}

}  // namespace

void rms_norm_rows(const NormParams& p, int64_t begin, int64_t end) {
    with_type(p.x_dtype, [&](auto x) {
        with_type(p.delta_dtype, [&](auto delta) {
            with_type(p.y_dtype, [&](auto y) {
                rms_norm_typed<TypeOf<decltype(x)>, TypeOf<decltype(delta)>, TypeOf<decltype(y)>>(p, begin,
                                                                                                  end);
            });
        });
    });
}

void silu_mul_rows(const SiluMulParams& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto gate) { silu_mul_typed<TypeOf<decltype(gate)>>(p, begin, end); });
}

}  // namespace APC_ISA
}  // namespace apcbatch
