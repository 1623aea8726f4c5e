// exp, the decay 2^t, log1p, softplus, SiLU and the sigmoid over vectors. They use only fma, + - * / and bit
// operations, so that every instruction set gives the same bits.
//
// Polynomials: minimax fits by Lawson's iteration on 4001 Chebyshev nodes in float64. The leading
// coefficients are fixed; the others are rounded to float32 one by one, lowest first, and the rest is fitted
// again after each rounding (tools/fit_polynomials.py). The bounds in ulp are measured over every float32
// where the function is not constant.
#pragma once

#include "simd.h"

namespace apcbatch {
namespace APC_ISA {

// Adding kRoundingShift rounds a float of magnitude below 2^22 to the nearest integer, in the low bits of the
// sum.
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23; its low 9 bits are zero

// 2^f for f in [-0.5, 0.5]: degree 5, exact at 0, weighted to a constant error of 1.06 ulp.
APC_INLINE Vec exp2_polynomial(Vec f) {
    Vec p = fma(Vec::broadcast(0x1.5aac90p-10f), f, Vec::broadcast(0x1.3cec48p-7f));
    p = fma(p, f, Vec::broadcast(0x1.c6babap-5f));
    p = fma(p, f, Vec::broadcast(0x1.ebf9b6p-3f));
    p = fma(p, f, Vec::broadcast(0x1.62e424p-1f));
    return fma(p, f, Vec::broadcast(1.0f));
}

// e^r for r in [-0.3466, 0.3466]: degree 6, 1 + r + r^2 q(r), relative error 2^-28.3. It is evaluated in two,
// and log1p_unit in four, independent parts (Estrin's scheme), to shorten long dependency chains.
APC_INLINE Vec exp_polynomial(Vec r) {
    const Vec r2 = r * r;
    const Vec low = fma(Vec::broadcast(0x1.555492p-3f), r, Vec::broadcast(0x1.fffffcp-2f));
    const Vec high = fma(Vec::broadcast(0x1.12396ep-7f), r, Vec::broadcast(0x1.5558aap-5f));
    const Vec q = fma(fma(Vec::broadcast(0x1.6a524ep-10f), r2, high), r2, low);
    return fma(q, r2, r + Vec::broadcast(1.0f));
}

// p * 2^k for k in [-254, 254] and p near 1, in two steps, exact except for the last rounding. Overflows to
// infinity; underflows gradually, through denormals to zero.
APC_INLINE Vec scale_by_power(Vec p, VecI k) {
    const VecI half = shift_right<1>(k);
    const VecI bias = VecI::broadcast(127);
    return p * as_float(shift_left<23>(half + bias)) * as_float(shift_left<23>(k - half + bias));
}

// p * 2^k if that is a normal number. shifted: k + kRoundingShift.
APC_INLINE Vec scale_normal(Vec p, Vec shifted) {
    return as_float(as_bits(p) + shift_left<23>(as_bits(shifted)));
}

// Product a * b = k + f, for |a * b| < 2^22: an integer k and a fraction f in [-0.5, 0.5] with one rounding.
struct Split {
    Vec shifted;  // k + kRoundingShift
    Vec f;
};

APC_INLINE Split split_product(Vec a, Vec b) {
    const Vec shifted = fma(a, b, Vec::broadcast(kRoundingShift));
    return {shifted, fma(a, b, Vec::broadcast(kRoundingShift) - shifted)};
}

// 2^(a b) of a split product with |a b| <= 125: the same bits as exp2_any.
APC_INLINE Vec exp2_of(Split split) { return scale_normal(exp2_polynomial(split.f), split.shifted); }

// 2^(a b) for any product: error at most 2 ulp (measured 1.82); infinity from 128 on, denormals below -126,
// zero below -150, NaN for NaN.
APC_INLINE Vec exp2_any(Vec a, Vec b) {
    const Vec lowest = Vec::broadcast(-151.0f), highest = Vec::broadcast(129.0f), product = a * b;
    const Mask low = product < lowest, high = highest < product;
    const Split split = split_product(a, b);
    Vec k = split.shifted - Vec::broadcast(kRoundingShift);
    k = select(low, lowest, select(high, highest, k)) + Vec::broadcast(kRoundingShift);
    const Vec f = select(low, Vec::zero(), select(high, Vec::zero(), split.f));
    return scale_by_power(exp2_polynomial(f), as_bits(k) - as_bits(Vec::broadcast(kRoundingShift)));
}

// Splits x = k ln 2 + f, k an integer. ln 2 is in two parts (Cody and Waite 1980); the high part has 10 bits,
// so that its product with k is exact.
APC_INLINE Split split_exponent(Vec x) {
    const Vec shifted = fma(x, Vec::broadcast(0x1.715476p+0f), Vec::broadcast(kRoundingShift));
    const Vec k = shifted - Vec::broadcast(kRoundingShift);
    return {shifted, fnma(k, Vec::broadcast(-2.12194440e-4f), fnma(k, Vec::broadcast(0.693359375f), x))};
}

// e^x: error at most 2 ulp (measured 1.28); infinity above 88.72, denormals below -87.33, zero below -103.97,
// NaN for NaN.
APC_INLINE Vec exp(Vec x) {
    const Split split = split_exponent(min(Vec::broadcast(89.0f), max(Vec::broadcast(-105.0f), x)));
    return scale_by_power(exp_polynomial(split.f),
                          as_bits(split.shifted) - as_bits(Vec::broadcast(kRoundingShift)));
}

// e^x for -87.3 <= x <= 88: the same bits as exp at two thirds of the work. For NaN the result is an
// arbitrary number.
APC_INLINE Vec exp_normal(Vec x) {
    const Split split = split_exponent(x);
    return scale_normal(exp_polynomial(split.f), split.shifted);
}

// log(1 + u) for u in [0, 1]: u + u^2 q(u), degree 10, relative error 2^-27.5; measured 1.34 ulp.
APC_INLINE Vec log1p_unit(Vec u) {
    const Vec u2 = u * u, u4 = u2 * u2;
    const Vec p0 = fma(Vec::broadcast(0x1.554dd0p-2f), u, Vec::broadcast(-0x1.ffffd2p-2f));
    const Vec p2 = fma(Vec::broadcast(0x1.934b54p-3f), u, Vec::broadcast(-0x1.ff23e6p-3f));
    const Vec p4 = fma(Vec::broadcast(0x1.b4ae08p-4f), u, Vec::broadcast(-0x1.3a435ep-3f));
    const Vec p6 = fma(Vec::broadcast(0x1.4917cep-6f), u, Vec::broadcast(-0x1.d6b08cp-5f));
    const Vec high = fma(fma(Vec::broadcast(-0x1.af49cep-9f), u2, p6), u2, p4);
    return fma(fma(high, u4, fma(p2, u2, p0)), u2, u);
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|): error at most 2.4 ulp; equal to x for x > 20, as in torch.
// Below -87 the result is e^-87, 1.6e-38.
APC_INLINE Vec softplus(Vec x) {
    const Vec u = exp_normal(max(Vec::broadcast(-87.0f), negate(absolute(x))));
    return max(Vec::zero(), x) + log1p_unit(u);
}

// x / (1 + e^-x): error at most 3.1 ulp down to -88. Below that the result is -5e-37, where torch goes to -0.
APC_INLINE Vec silu(Vec x) {
    x = max(Vec::broadcast(-88.0f), x);
    return x / (Vec::broadcast(1.0f) + exp_normal(max(Vec::broadcast(-87.0f), negate(x))));
}

// 1 / (1 + e^-x): error at most 3.2 ulp down to -87; 0 below -88.72, NaN for NaN.
APC_INLINE Vec sigmoid(Vec x) { return Vec::broadcast(1.0f) / (Vec::broadcast(1.0f) + exp(negate(x))); }

}  // namespace APC_ISA
}  // namespace apcbatch
