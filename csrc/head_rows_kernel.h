// RMS norm of each head (Zhang and Sennrich 2019, equation 4) with rotary position embedding (Su et al.,
// arXiv 2104.09864, section 3.2), and the output gate x * sigmoid(gate).
//
// For given steps, angles are exact: a step is an integer number of 2^-64 turns, and so is its product with
// the position, modulo a turn. Cosine and sine are computed in double by * and + alone, in a fixed order,
// and rounded once to float32. So no mathematical library is involved, and their bits are the same on every
// machine. The rest is float32.
#pragma once

#include "head_rows.h"
#include "square_sum.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace {

constexpr double kRadians = 0x1.921fb54442d18p-62;  // 2 pi / 2^64: radians per unit of steps

// Writes cosine and sine of position * steps[i], each rounded once from double. The Taylor series are
// evaluated at most an eighth of a turn from the nearest quarter turn, where their truncation errors are
// below 1e-16.
APC_INLINE void rotate_unit(const int64_t* steps, int64_t pairs, int64_t position, float* cosine,
                            float* sine) {
    for (int64_t i = 0; i < pairs; ++i) {
        const uint64_t angle = uint64_t(position) * uint64_t(steps[i]);
        const uint64_t quarter = (angle + (uint64_t(1) << 61)) >> 62;
        const double x = double(int64_t(angle - (quarter << 62))) * kRadians, x2 = x * x;
        double s = -1.0 / 1307674368000.0;  // 1 / 15!
        s = s * x2 + 1.0 / 6227020800.0;
        s = s * x2 - 1.0 / 39916800.0;
        s = s * x2 + 1.0 / 362880.0;
        s = s * x2 - 1.0 / 5040.0;
        s = s * x2 + 1.0 / 120.0;
        s = s * x2 - 1.0 / 6.0;
        s = s * x2 * x + x;
        double c = 1.0 / 20922789888000.0;  // 1 / 16!
        c = c * x2 - 1.0 / 87178291200.0;
        c = c * x2 + 1.0 / 479001600.0;
        c = c * x2 - 1.0 / 3628800.0;
        c = c * x2 + 1.0 / 40320.0;
        c = c * x2 - 1.0 / 720.0;
        c = c * x2 + 1.0 / 24.0;
        c = c * x2 - 0.5;
        c = c * x2 + 1.0;
        const double of_cosine = quarter & 1 ? s : c, of_sine = quarter & 1 ? c : s;
        cosine[i] = float((quarter + 1) & 2 ? -of_cosine : of_cosine);
        sine[i] = float(quarter & 2 ? -of_sine : of_sine);
    }
}

// Rotates columns i and pairs + i of a head.
APC_INLINE void rotate(float* head, int64_t pairs, const float* cosine, const float* sine) {
    float *first = head, *second = head + pairs;
    for (int64_t i = 0; i < pairs; i += kLanes) {
        const int64_t left = pairs - i;
        const Vec a = load_first(first + i, left), b = load_first(second + i, left);
        const Vec c = load_first(cosine + i, left), s = load_first(sine + i, left);
        store_first(a * c - b * s, first + i, left);
        store_first(b * c + a * s, second + i, left);
    }
}

template <class T>
void norm_rope_typed(const NormRopeParams& p, int64_t begin, int64_t end, char* scratch) {
    const int64_t d = p.head_dim;
    float* head = reinterpret_cast<float*>(scratch);
    float *cosine = head + d + 16, *sine = cosine + p.pairs + 16;
    for (int64_t r = begin; r < end; ++r) {
        rotate_unit(p.steps, p.pairs, p.positions[r], cosine, sine);
        const T* x = static_cast<const T*>(p.x) + r * p.x_stride;
        T* y = static_cast<T*>(p.y) + r * p.y_stride;
        for (int64_t h = 0; h < p.heads; ++h, x += d, y += d) {
            if (p.weight) {
                const float mean = square_sum(x, d) / float(d);
                normalise(x, p.weight, 1.0f / __builtin_sqrtf(mean + p.eps), head, d);
            } else {
                convert_row(x, head, d);
            }
            rotate(head, p.pairs, cosine, sine);
            convert_row(head, y, d);
        }
    }
}

template <class T>
void sigmoid_mul_typed(const SigmoidMulParams& p, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const T* x = static_cast<const T*>(p.x) + r * p.x_stride;
        const T* gate = static_cast<const T*>(p.gate) + r * p.gate_stride;
        T* y = static_cast<T*>(p.y) + r * p.y_stride;
        for (int64_t at = 0; at < p.h; at += kLanes) {
            const int64_t left = p.h - at;
            store_first(load_first(x + at, left) * sigmoid(load_first(gate + at, left)), y + at, left);
        }
    }
}

}  // namespace

void norm_rope_rows(const NormRopeParams& p, int64_t begin, int64_t end, char* scratch) {
    with_type(p.dtype, [&](auto x) { norm_rope_typed<TypeOf<decltype(x)>>(p, begin, end, scratch); });
}

void sigmoid_mul_rows(const SigmoidMulParams& p, int64_t begin, int64_t end) {
    with_type(p.dtype, [&](auto x) { sigmoid_mul_typed<TypeOf<decltype(x)>>(p, begin, end); });
}

}  // namespace APC_ISA
}  // namespace apcbatch
