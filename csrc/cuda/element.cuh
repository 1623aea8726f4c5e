// Loads and stores of float32 and bfloat16 elements in pairs, widened to float32 for arithmetic.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>

namespace apcbatch {
namespace cuda {

// Two adjacent elements in memory.
template <class T>
struct PairOf {
    using Type = std::uint32_t;
};
template <>
struct PairOf<float> {
    using Type = uint2;
};
template <class T>
using Pair = typename PairOf<T>::Type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

template <class T>
__device__ __forceinline__ float2 widen_pair(Pair<T> raw);
template <>
__device__ __forceinline__ float2 widen_pair<float>(uint2 raw) {
    return make_float2(__uint_as_float(raw.x), __uint_as_float(raw.y));
}
template <>
__device__ __forceinline__ float2 widen_pair<__nv_bfloat16>(std::uint32_t raw) {
    return make_float2(__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u));
}

__device__ __forceinline__ Pair<float> zero_pair(float) { return make_uint2(0u, 0u); }
__device__ __forceinline__ std::uint32_t zero_pair(__nv_bfloat16) { return 0u; }

__device__ __forceinline__ uint2 join(float a, float b) {
    return make_uint2(__float_as_uint(a), __float_as_uint(b));
}
template <class T>
__device__ __forceinline__ std::uint32_t join(T a, T b) {
    return std::uint32_t(*reinterpret_cast<const std::uint16_t*>(&a)) |
           std::uint32_t(*reinterpret_cast<const std::uint16_t*>(&b)) << 16;
}

// Loads the elements at p and p + 1. The second is `absent` unless `both`. paired: one aligned load may read
// both.
template <class T>
__device__ __forceinline__ Pair<T> load_pair(const T* p, bool both, bool paired, T absent = T(0.0f)) {
    if (paired) return __ldg(reinterpret_cast<const Pair<T>*>(p));
    return join(*p, both ? p[1] : absent);
}

template <class T>
__device__ __forceinline__ void store_pair(T* p, float2 value, bool both, bool paired) {
    const T first = narrow<T>(value.x), second = narrow<T>(value.y);
    if (paired) {
        *reinterpret_cast<Pair<T>*>(p) = join(first, second);
    } else {
        *p = first;
        if (both) p[1] = second;
    }
}

// Address and row stride in elements.
struct Strided {
    const void* base;
    std::int64_t stride;
};

// Returns true if the rows of all these matrices consist of aligned groups of `group` elements.
template <class T>
bool aligned(std::initializer_list<Strided> all, std::int64_t columns, int group) {
    bool every = columns % group == 0;
    for (const Strided& one : all) {
        every = every && one.stride % group == 0 &&
                reinterpret_cast<std::uintptr_t>(one.base) % (group * sizeof(T)) == 0;
    }
    return every;
}

}  // namespace cuda
}  // namespace apcbatch
