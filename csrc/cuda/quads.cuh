// Loads and stores of adjacent elements in groups, and sums over a warp and a block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../params.h"
#include "element.cuh"

namespace apcbatch {
namespace cuda {

// Adjacent elements that one aligned access loads or stores.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Group {
    T at[kCount];
};
template <class T>
using Quad = Group<T, 4>;

// Load or store kStep elements: 4, or 1 in the first component.
template <int kStep, class T>
__device__ __forceinline__ void load(const T* p, float (&values)[4]) {
    if constexpr (kStep == 4) {
        const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(p);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = widen(quad.at[i]);
    } else {
        values[0] = widen(*p);
    }
}

template <int kStep, class T>
__device__ __forceinline__ void store(const float (&values)[4], T* p) {
    if constexpr (kStep == 4) {
        Quad<T> quad;
#pragma unroll
        for (int i = 0; i < 4; ++i) quad.at[i] = narrow<T>(values[i]);
        *reinterpret_cast<Quad<T>*>(p) = quad;
    } else {
        *p = narrow<T>(values[0]);
    }
}

// Sums `count` rows, `stride` elements apart, in ascending order: kQuads groups of kStep columns, `apart`
// columns apart, of those that begin before `end`.
template <int kStep, int kQuads = 1>
__device__ __forceinline__ void sum_rows(const float* rows, int count, std::int64_t stride,
                                         float (&sums)[kQuads][4], int apart = 0, int end = 1) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
        if (j * apart < end) load<kStep>(rows + j * apart, sums[j]);
    }
#pragma unroll 4
    for (int i = 1; i < count; ++i) {
        float row[kQuads][4];
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
            if (j * apart < end) load<kStep>(rows + i * stride + j * apart, row[j]);
        }
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
#pragma unroll
            for (int c = 0; c < kStep; ++c) sums[j][c] = __fadd_rn(sums[j][c], row[j][c]);
        }
    }
}

// Returns true if rows of `columns` elements can be read four at a time, or if p is null.
inline bool may_quad(const void* p, std::int64_t stride, std::int64_t columns, DType dtype) {
    const std::uintptr_t bytes = dtype == DType::float32 ? 16 : 8;
    return columns % 4 == 0 && stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

// Calls function with an element of the dtype's C++ type; only its type matters.
template <class Function>
void with_element(DType dtype, Function function) {
    switch (dtype) {
        case DType::float32:
            return function(float());
        case DType::bfloat16:
            return function(__nv_bfloat16());
    }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
    return value;
}

// Returns the sum over the block to every thread, as a fixed tree.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value) {
    value = warp_sum(value);
    if constexpr (kThreads > 32) {
        __shared__ float parts[kThreads / 32];
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
        __syncthreads();
        value = 0.0f;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) value += parts[i];
    }
    return value;
}

}  // namespace cuda
}  // namespace apcbatch
