// RMS norm (Zhang and Sennrich 2019, equation 4), alone, after the residual addition or gated by silu(gate);
// silu(gate) * up, and the squared ReLU. square_sum.h has the order of the norm's sum.
#pragma once

#include "rowwise.h"
#include "square_sum.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

// Returns the sum of squares of a row. With a delta, first adds it to the row in place.
template <class X, class Delta>
APC_INLINE float summed_squares(X* x, const Delta* delta, int64_t h) {
    if (!delta) return square_sum(x, h);
    return square_sum_of(h, [&](int64_t at) __attribute__((always_inline)) {
        const Vec value = load_first(x + at, h - at) + load_first(delta + at, h - at);
        store_first(value, x + at, h - at);
        return value;
    });
}

template <class X, class Delta, class Y>
void rms_norm_typed(const NormParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        X* x = static_cast<X*>(p.x) + r * p.x_stride;
        const Delta* delta = p.delta ? static_cast<const Delta*>(p.delta) + r * p.delta_stride : nullptr;
        const float mean = summed_squares(x, delta, p.h) / float(p.h);
        normalise(x, p.weight, 1.0f / __builtin_sqrtf(mean + p.eps), static_cast<Y*>(p.y) + r * p.h, p.h);
    }
}

template <bool kSilu, class T>
void silu_mul_typed(const SiluMulParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(p.gate) + r * p.gate_stride;
        const T* up = static_cast<const T*>(p.up) + r * p.up_stride;
        T* y = static_cast<T*>(p.y) + r * p.y_stride;
        for (int64_t at = 0; at < p.f; at += kLanes) {
            const int64_t left = p.f - at;
            const Vec one = load_first(gate + at, left);
            store_first((kSilu ? silu(one) : one) * load_first(up + at, left), y + at, left);
        }
    }
}

template <class T>
void relu_square_typed(const ReluSquareParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(p.x) + r * p.x_stride;
        T* y = static_cast<T*>(p.y) + r * p.y_stride;
        for (int64_t at = 0; at < p.f; at += kLanes) {
            const Vec value = max(Vec::zero(), load_first(x + at, p.f - at));  // keeps NaN
            store_first(value * value, y + at, p.f - at);
        }
    }
}

template <class T>
APC_INLINE void gate_head(const float* x, const T* gate, T* y, int64_t d) {
    for (int64_t at = 0; at < d; at += kLanes)
        store_first(load_first(x + at, d - at) * silu(load_first(gate + at, d - at)), y + at, d - at);
}

template <bool kGateFirst, class T>
void gated_norm_typed(const GatedNormParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        for (int64_t head = 0; head < p.heads; ++head) {
            const float* x = p.x + r * p.x_stride + head * p.x_head_stride;
            const T* gate = static_cast<const T*>(p.gate) + r * p.gate_stride + head * p.d;
            T* y = static_cast<T*>(p.y) + (r * p.heads + head) * p.d;
            if (!p.weight) {
                gate_head(x, gate, y, p.d);
                continue;
            }
            const float* weight = p.weight + head * p.weight_stride;
            const auto value = [&](int64_t at) __attribute__((always_inline)) {
                const Vec one = load_first(x + at, p.d - at);
                return kGateFirst ? one * silu(load_first(gate + at, p.d - at)) : one;
            };
            const float mean = square_sum_of(p.d, value) / float(p.d);
            const Vec scale = Vec::broadcast(1.0f / __builtin_sqrtf(mean + p.eps));
            for (int64_t at = 0; at < p.d; at += kLanes) {
                const int64_t left = p.d - at;
                const Vec normed = value(at) * scale * load_first(weight + at, left);
                store_first(kGateFirst ? normed : normed * silu(load_first(gate + at, left)), y + at, left);
            }
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

void gated_norm_rows(const GatedNormParams& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto gate) {
        using T = TypeOf<decltype(gate)>;
        p.gate_first ? gated_norm_typed<true, T>(p, begin, end) : gated_norm_typed<false, T>(p, begin, end);
    });
}

void silu_mul_rows(const SiluMulParams& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto gate) {
        using T = TypeOf<decltype(gate)>;
        p.has_silu ? silu_mul_typed<true, T>(p, begin, end) : silu_mul_typed<false, T>(p, begin, end);
    });
}

void relu_square_rows(const ReluSquareParams& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto x) { relu_square_typed<TypeOf<decltype(x)>>(p, begin, end); });
}

}  // namespace APC_ISA
}  // namespace apcbatch
