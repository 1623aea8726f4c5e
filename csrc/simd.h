// One float vector type per instruction set: Vec (float32 lanes), VecI (their bits), Mask. The kernels are
// templates and inline functions over them and are compiled once per instruction set, with that set's flags.
//
// Everything is in apcbatch::APC_ISA, a namespace named after the instruction set. So the linker can never
// merge code built with AVX flags into a path that runs without AVX. For the same reason, this file and those
// that include it must not use templates or inline functions of the standard library.
//
// All instruction sets give the same bits: each operation is one IEEE operation per lane (fma is fused even
// without hardware support), the build uses -ffp-contract=off, and max/min return the second operand if
// either is NaN.
#pragma once

#include <stdint.h>
#include <string.h>

#include "params.h"

#if defined(__AVX2__)
// GCC 12 wrongly warns about the undefined pass-through operand inside its own AVX-512 intrinsics (GCC bug
// 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#if !defined(APC_ISA)  // the build defines it together with the flags (build_flags.py)
#define APC_ISA plain
#endif

#define APC_INLINE inline __attribute__((always_inline))

namespace apcbatch {
namespace APC_ISA {

APC_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A number as a type.
template <int number>
struct Number {
    static constexpr int value = number;
};

// Calls body(Number<count>()) for a count of `least` to `most`.
template <int most, int least = 1, class Body>
APC_INLINE void with_number([[maybe_unused]] int64_t count, const Body& body) {
    if constexpr (least < most) {
        if (count != least) return with_number<most, least + 1>(count, body);
    }
    body(Number<least>());
}

// Scalar conversions, with the same bits as the vector conversions below.
APC_INLINE float to_float(float value) { return value; }
APC_INLINE float to_float(BFloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float widened;
    memcpy(&widened, &bits, sizeof(widened));
    return widened;
}

#if defined(__AVX512F__)

struct VecI {
    static constexpr int lanes = 16;
    __m512i v;
    // Loads bytes v * lanes and up of 16 bytes into the upper bytes of the lanes, with zeros below.
    static APC_INLINE VecI load_upper(const char* p, int) {
        return {_mm512_slli_epi32(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                                  24)};
    }
    static APC_INLINE VecI broadcast(int32_t value) { return {_mm512_set1_epi32(value)}; }
};

struct Mask {
    __mmask16 m;
    APC_INLINE bool all() const { return m == 0xffff; }
};

struct Vec {
    static constexpr int lanes = 16;
    __m512 v;

    static APC_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
    static APC_INLINE Vec broadcast(float value) { return {_mm512_set1_ps(value)}; }
    static APC_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static APC_INLINE Vec load_bytes(const char* p) { return {_mm512_loadu_ps(p)}; }  // of any type
    static APC_INLINE Vec load(const BFloat16* p) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
    }
    APC_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
    APC_INLINE void store(BFloat16* p) const {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        const __m512i rounded = _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, even, quiet), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
    }
};

APC_INLINE Mask operator<(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
APC_INLINE Mask operator<=(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
APC_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
APC_INLINE VecI as_bits(Vec a) { return {_mm512_castps_si512(a.v)}; }
APC_INLINE Vec as_float(VecI a) { return {_mm512_castsi512_ps(a.v)}; }
APC_INLINE VecI operator&(VecI a, VecI b) { return {_mm512_and_si512(a.v, b.v)}; }
APC_INLINE VecI operator|(VecI a, VecI b) { return {_mm512_or_si512(a.v, b.v)}; }

#elif defined(__AVX2__)

struct VecI {
    static constexpr int lanes = 8;
    __m256i v;
    // Loads bytes v * lanes and up of 16 bytes into the upper bytes of the lanes, with zeros below.
    static APC_INLINE VecI load_upper(const char* p, int v) {
        const __m256i low = _mm256_setr_epi32(0x00808080, 0x01808080, 0x02808080, 0x03808080, 0x04808080,
                                              0x05808080, 0x06808080, 0x07808080);
        const __m256i high = _mm256_setr_epi32(0x08808080, 0x09808080, 0x0a808080, 0x0b808080, 0x0c808080,
                                               0x0d808080, 0x0e808080, 0x0f808080);
        const __m256i both =
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return {_mm256_shuffle_epi8(both, v == 0 ? low : high)};
    }
    static APC_INLINE VecI broadcast(int32_t value) { return {_mm256_set1_epi32(value)}; }
};

struct Mask {
    __m256 m;
    APC_INLINE bool all() const { return _mm256_movemask_ps(m) == 0xff; }
};

struct Vec {
    static constexpr int lanes = 8;
    __m256 v;

    static APC_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
    static APC_INLINE Vec broadcast(float value) { return {_mm256_set1_ps(value)}; }
    static APC_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static APC_INLINE Vec load_bytes(const char* p) {  // of any type
        return {_mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static APC_INLINE Vec load(const BFloat16* p) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
    }
    APC_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
    APC_INLINE void store(BFloat16* p) const {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
};

APC_INLINE Mask operator<(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
APC_INLINE Mask operator<=(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
APC_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, m.m)}; }
APC_INLINE VecI as_bits(Vec a) { return {_mm256_castps_si256(a.v)}; }
APC_INLINE Vec as_float(VecI a) { return {_mm256_castsi256_ps(a.v)}; }
APC_INLINE VecI operator&(VecI a, VecI b) { return {_mm256_and_si256(a.v, b.v)}; }
APC_INLINE VecI operator|(VecI a, VecI b) { return {_mm256_or_si256(a.v, b.v)}; }

#else

// Eight lanes as an array. The compiler vectorises the loops for the base architecture.
struct VecI {
    static constexpr int lanes = 8;
    alignas(16) int32_t v[lanes];
    // Loads bytes v * lanes and up of 16 bytes into the upper bytes of the lanes, with zeros below.
    static APC_INLINE VecI load_upper(const char* p, int v) {
        VecI r;
        for (int i = 0; i < lanes; ++i) r.v[i] = int32_t(uint32_t(uint8_t(p[v * lanes + i])) << 24);
        return r;
    }
    static APC_INLINE VecI broadcast(int32_t value) {
        VecI r;
        for (int i = 0; i < lanes; ++i) r.v[i] = value;
        return r;
    }
};

struct Mask {
    bool v[8];
    APC_INLINE bool all() const {
        bool r = true;
        for (int i = 0; i < 8; ++i) r &= v[i];
        return r;
    }
};

APC_INLINE BFloat16 round_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (value != value) return {uint16_t((bits | 0x400000) >> 16)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// An emulated fused multiply-add is some twenty instructions per lane. It is a call, as hundreds of inlined
// copies in one kernel take the compiler minutes.
#if defined(__FP_FAST_FMAF)
#define APC_FUSED APC_INLINE
#else
#define APC_FUSED inline __attribute__((noinline))
#endif

// Returns a * b + c with one rounding. Without hardware support: the product of two floats is exact in
// double. The sum is rounded to odd in double; its error, from Knuth's TwoSum, shows which neighbour has the
// odd last bit. A value rounded to odd with more than two spare bits rounds to the correct float (Boldo and
// Melquiond, 2008).
APC_INLINE float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    const double product = double(a) * double(b);
    const double sum = product + double(c);
    const double part = sum - product;
    const double error = (product - (sum - part)) + (double(c) - part);
    // Works on the bits, without a branch, so that the compiler can vectorise it. An inexact sum is not zero.
    uint64_t bits, error_bits;
    memcpy(&bits, &sum, sizeof(bits));
    memcpy(&error_bits, &error, sizeof(error_bits));
    const uint64_t inexact = __builtin_fabs(error) > 0.0;  // 0 for a NaN error: keeps infinities and NaN
    const uint64_t outward = 1 - ((error_bits ^ bits) >> 63) * 2;
    bits += (0 - (inexact & ~bits & 1)) & outward;
    double odd;
    memcpy(&odd, &bits, sizeof(odd));
    return float(odd);
#endif
}

struct Vec {
    static constexpr int lanes = 8;
    alignas(16) float v[lanes];

    static APC_INLINE Vec broadcast(float value) {
        Vec r;
        for (int i = 0; i < lanes; ++i) r.v[i] = value;
        return r;
    }
    static APC_INLINE Vec zero() { return broadcast(0.0f); }
    template <class T>
    static APC_INLINE Vec load(const T* p) {
        Vec r;
        for (int i = 0; i < lanes; ++i) r.v[i] = to_float(p[i]);
        return r;
    }
    static APC_INLINE Vec load_bytes(const char* p) {  // of any type
        Vec r;
        memcpy(r.v, p, sizeof(r.v));
        return r;
    }
    APC_INLINE void store(float* p) const {
        for (int i = 0; i < lanes; ++i) p[i] = v[i];
    }
    APC_INLINE void store(BFloat16* p) const {
        for (int i = 0; i < lanes; ++i) p[i] = round_to_bfloat16(v[i]);
    }
};

#define APC_LANEWISE(Result, name, Operand, expression) \
    APC_INLINE Result name(Operand a, Operand b) {      \
        Result r;                                       \
        for (int i = 0; i < 8; ++i) {                   \
            const auto p = a.v[i], q = b.v[i];          \
            r.v[i] = expression;                        \
        }                                               \
        return r;                                       \
    }
APC_LANEWISE(Vec, operator+, Vec, p + q)
APC_LANEWISE(Vec, operator-, Vec, p - q)
APC_LANEWISE(Vec, operator*, Vec, p* q)
APC_LANEWISE(Vec, operator/, Vec, p / q)
APC_LANEWISE(Vec, max, Vec, p > q ? p : q)
APC_LANEWISE(Vec, min, Vec, p < q ? p : q)
APC_LANEWISE(Mask, operator<, Vec, p < q)
APC_LANEWISE(Mask, operator<=, Vec, p <= q)
APC_LANEWISE(VecI, operator+, VecI, int32_t(uint32_t(p) + uint32_t(q)))
APC_LANEWISE(VecI, operator-, VecI, int32_t(uint32_t(p) - uint32_t(q)))
APC_LANEWISE(VecI, operator&, VecI, p& q)
APC_LANEWISE(VecI, operator|, VecI, p | q)
APC_LANEWISE(VecI, max, VecI, p > q ? p : q)
#undef APC_LANEWISE

APC_FUSED Vec fma(Vec a, Vec b, Vec c) {
    Vec r;
    for (int i = 0; i < 8; ++i) r.v[i] = fused(a.v[i], b.v[i], c.v[i]);
    return r;
}
APC_FUSED Vec fnma(Vec a, Vec b, Vec c) {
    Vec r;
    for (int i = 0; i < 8; ++i) r.v[i] = fused(-a.v[i], b.v[i], c.v[i]);
    return r;
}
APC_INLINE Vec select(Mask m, Vec yes, Vec no) {
    Vec r;
    for (int i = 0; i < 8; ++i) r.v[i] = m.v[i] ? yes.v[i] : no.v[i];
    return r;
}
APC_INLINE VecI as_bits(Vec a) {
    VecI r;
    memcpy(r.v, a.v, sizeof(r.v));
    return r;
}
APC_INLINE Vec as_float(VecI a) {
    Vec r;
    memcpy(r.v, a.v, sizeof(r.v));
    return r;
}
APC_INLINE Vec convert(VecI a) {
    Vec r;
    for (int i = 0; i < 8; ++i) r.v[i] = float(a.v[i]);
    return r;
}
template <int count>
APC_INLINE VecI shift_left(VecI a) {
    VecI r;
    for (int i = 0; i < 8; ++i) r.v[i] = int32_t(uint32_t(a.v[i]) << count);
    return r;
}
template <int count>
APC_INLINE VecI shift_right(VecI a) {  // arithmetic: keeps the sign
    VecI r;
    for (int i = 0; i < 8; ++i) r.v[i] = a.v[i] >> count;
    return r;
}

#endif

#if defined(__AVX2__)

// The operations that AVX-512 and AVX2 have by the same name.
#if defined(__AVX512F__)
#define APC_MM(operation) _mm512_##operation
#else
#define APC_MM(operation) _mm256_##operation
#endif
APC_INLINE Vec operator+(Vec a, Vec b) { return {APC_MM(add_ps)(a.v, b.v)}; }
APC_INLINE Vec operator-(Vec a, Vec b) { return {APC_MM(sub_ps)(a.v, b.v)}; }
APC_INLINE Vec operator*(Vec a, Vec b) { return {APC_MM(mul_ps)(a.v, b.v)}; }
APC_INLINE Vec operator/(Vec a, Vec b) { return {APC_MM(div_ps)(a.v, b.v)}; }
APC_INLINE Vec fma(Vec a, Vec b, Vec c) { return {APC_MM(fmadd_ps)(a.v, b.v, c.v)}; }
APC_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {APC_MM(fnmadd_ps)(a.v, b.v, c.v)}; }
APC_INLINE Vec max(Vec a, Vec b) { return {APC_MM(max_ps)(a.v, b.v)}; }
APC_INLINE Vec min(Vec a, Vec b) { return {APC_MM(min_ps)(a.v, b.v)}; }
APC_INLINE Vec convert(VecI a) { return {APC_MM(cvtepi32_ps)(a.v)}; }
APC_INLINE VecI operator+(VecI a, VecI b) { return {APC_MM(add_epi32)(a.v, b.v)}; }
APC_INLINE VecI operator-(VecI a, VecI b) { return {APC_MM(sub_epi32)(a.v, b.v)}; }
APC_INLINE VecI max(VecI a, VecI b) { return {APC_MM(max_epi32)(a.v, b.v)}; }
template <int count>
APC_INLINE VecI shift_left(VecI a) {
    return {APC_MM(slli_epi32)(a.v, count)};
}
template <int count>
APC_INLINE VecI shift_right(VecI a) {  // arithmetic: keeps the sign
    return {APC_MM(srai_epi32)(a.v, count)};
}
#undef APC_MM

#endif

constexpr int kLanes = Vec::lanes;

// sum = fma(a, b, sum) in the sum's own register. From fma alone GCC makes loops that copy accumulators, one
// move for every five products.
APC_INLINE void accumulate(Vec& sum, Vec a, Vec b) {
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "vm"(b.v));
#elif defined(__AVX2__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum.v) : "x"(a.v), "xm"(b.v));
#else
    sum = fma(a, b, sum);
#endif
}

// Loads the first `count` lanes (1 to all), with zeros in the others. Never reads memory past them.
template <class T>
APC_INLINE Vec load_partial(const T* p, int64_t count) {
    T padded[kLanes] = {};
    memcpy(padded, p, sizeof(T) * size_t(count));
    return Vec::load(padded);
}

template <class T>
APC_INLINE void store_partial(Vec value, T* p, int64_t count) {
    T padded[kLanes];
    value.store(padded);
    memcpy(p, padded, sizeof(T) * size_t(count));
}

// Load and store the first `count` lanes of a vector, 1 or more: all from kLanes on.
template <class T>
APC_INLINE Vec load_first(const T* p, int64_t count) {
    return count >= kLanes ? Vec::load(p) : load_partial(p, count);
}

template <class T>
APC_INLINE void store_first(Vec value, T* p, int64_t count) {
    if (count >= kLanes) {
        value.store(p);
    } else {
        store_partial(value, p, count);
    }
}

// Copies `count` values as another type.
template <class From, class To>
APC_INLINE void convert_row(const From* from, To* to, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes)
        store_first(load_first(from + i, count - i), to + i, count - i);
}

APC_INLINE Vec absolute(Vec a) { return as_float(as_bits(a) & VecI::broadcast(0x7fffffff)); }
APC_INLINE Vec negate(Vec a) { return as_float(as_bits(a) + VecI::broadcast(int32_t(0x80000000u))); }

}  // namespace APC_ISA
}  // namespace apcbatch
