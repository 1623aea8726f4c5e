// What the kernels are called with: plain structs of addresses, sizes and strides. No Python, no torch, no
// ISA. Strides count elements. Every struct is filled once a call by bindings.cpp and read by all threads.
#pragma once

#include <cstdint>

namespace apcbatch {

// The upper half of a float32. Arithmetic on it happens in float32 only (simd.h widens and rounds).
struct BFloat16 {
    std::uint16_t bits;
};

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };  // float16: CUDA kernels alone

// Whatever makes a DType of a number checks that it is one of them. A choice by type is a switch without a
// default, so that the compiler names what a new type leaves out.
constexpr std::int64_t bytes_of(DType dtype) {
    switch (dtype) {
        case DType::float32:
            return 4;
        case DType::bfloat16:
        case DType::float16:
            return 2;
    }
    __builtin_trap();
}

// Stands for a type of values that is known at run time only: Of<T>::type is T.
template <class T>
struct Of {
    using type = T;
};

// function(Of<T>()) for the type T of the values. The CPU has no kernels for float16.
template <class Function>
inline __attribute__((always_inline)) auto with_type(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::float32:
            return function(Of<float>());
        case DType::bfloat16:
            return function(Of<BFloat16>());
        case DType::float16:
            break;
    }
    __builtin_trap();
}

template <class T>
using TypeOf = typename T::type;  // TypeOf<decltype(x)> of an Of

// The packed batch's metadata (apcbatch/kernels/ragged.py says what each list means and checks them all).
struct RaggedParams {
    std::int64_t num_sequences;
    const std::int64_t* cu_seqlens;          // (b + 1)
    const std::int64_t* initial_slots;       // (b), -1: zeros
    const std::int64_t* final_slots;         // (b), -1: not written
    const std::int64_t* snapshot_cu;         // (b + 1)
    const std::int64_t* snapshot_positions;  // (k)
    const std::int64_t* snapshot_slots;      // (k)
};

struct ConvParams {
    RaggedParams ragged;
    DType dtype;           // of x, out and state
    std::int64_t d_inner;  // channels
    std::int64_t width;    // taps, 1 .. 8
    const void* x;         // (t, d), token stride x_stride
    std::int64_t x_stride;
    const void* weight;  // (d, w) contiguous
    DType weight_dtype;  // of weight and bias
    const void* bias;    // (d) or null
    void* state;         // (num_slots, w - 1, d), slot stride state_stride
    std::int64_t state_stride;
    void* out;  // (t, d), token stride out_stride
    std::int64_t out_stride;
};

struct ScanParams {
    RaggedParams ragged;
    DType dtype;           // of x, dt, B, C, z and out
    std::int64_t d_inner;  // channels
    std::int64_t d_state;  // states a channel
    const void* x;         // (t, d)
    std::int64_t x_stride;
    const void* dt;  // (t, d), before bias and softplus
    std::int64_t dt_stride;
    const float* A;  // (n, d) contiguous
    const void* B;   // (t, n)
    std::int64_t B_stride;
    const void* C;  // (t, n)
    std::int64_t C_stride;
    const float* D;  // (d) or null
    const void* z;   // (t, d) or null
    std::int64_t z_stride;
    const float* dt_bias;  // (d) or null
    float* state;          // (num_slots, n, d), slot stride state_stride
    std::int64_t state_stride;
    void* out;  // (t, d)
    std::int64_t out_stride;
};

}  // namespace apcbatch
