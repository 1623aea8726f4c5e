// Arguments of the kernels: plain structs of addresses, sizes and strides, independent of Python, torch and
// the instruction set. Strides are in elements. The bindings fill a struct once per call; all threads read
// it.
#pragma once

#include <cstdint>

namespace apcbatch {

// The upper 16 bits of a float32. Arithmetic is in float32 only; simd.h widens and rounds.
struct BFloat16 {
    std::uint16_t bits;
};

enum class DType : int { float32 = 0, bfloat16 = 1 };

// Conversions from a number to DType check its range. Switches over DType have no default, so that the
// compiler reports each switch that lacks a new type.
constexpr inline __attribute__((always_inline)) std::int64_t bytes_of(DType dtype) {
    switch (dtype) {
        case DType::float32:
            return 4;
        case DType::bfloat16:
            return 2;
    }
    __builtin_trap();
}

// Tag for a value type selected at run time: Of<T>::type is T.
template <class T>
struct Of {
    using type = T;
};

// Calls function(Of<T>()) with the C++ type T of a DType.
template <class Function>
inline __attribute__((always_inline)) auto with_type(DType dtype, const Function& function) {
    switch (dtype) {
        case DType::float32:
            return function(Of<float>());
        case DType::bfloat16:
            return function(Of<BFloat16>());
    }
    __builtin_trap();
}

template <class T>
using TypeOf = typename T::type;  // TypeOf<decltype(tag)>: the type of a tag Of<T>

// Metadata of a packed batch; apcbatch/kernels/ragged.py defines and checks each array.
struct RaggedParams {
    std::int64_t num_sequences = 0;
    const std::int64_t* cu_seqlens = nullptr;          // (b + 1)
    const std::int64_t* initial_slots = nullptr;       // (b), -1: zeros
    const std::int64_t* final_slots = nullptr;         // (b), -1: not written
    const std::int64_t* snapshot_cu = nullptr;         // (b + 1)
    const std::int64_t* snapshot_positions = nullptr;  // (k)
    const std::int64_t* snapshot_slots = nullptr;      // (k)
};

struct ConvParams {
    RaggedParams ragged;
    DType dtype = DType::float32;  // of x, out and state
    std::int64_t d_inner = 0;      // channels
    std::int64_t width = 0;        // taps, 1 .. 8
    const void* x = nullptr;       // (t, d), token stride x_stride
    std::int64_t x_stride = 0;
    const float* weight = nullptr;  // (d, w) contiguous
    const float* bias = nullptr;    // (d) or null
    void* state = nullptr;          // (num_slots, w - 1, d), slot stride state_stride
    std::int64_t state_stride = 0;
    void* out = nullptr;  // (t, d), token stride out_stride
    std::int64_t out_stride = 0;
    bool has_silu = true;  // out is the SiLU of the sum, else the sum
};

struct ScanParams {
    RaggedParams ragged;
    DType dtype = DType::float32;  // of x, dt, B, C, z and out
    std::int64_t d_inner = 0;      // channels
    std::int64_t d_state = 0;      // states a channel
    const void* x = nullptr;       // (t, d)
    std::int64_t x_stride = 0;
    const void* dt = nullptr;  // (t, d), before bias and softplus
    std::int64_t dt_stride = 0;
    const float* A = nullptr;  // (n, d) contiguous
    const void* B = nullptr;   // (t, n)
    std::int64_t B_stride = 0;
    const void* C = nullptr;  // (t, n)
    std::int64_t C_stride = 0;
    const float* D = nullptr;  // (d) or null
    const void* z = nullptr;   // (t, d) or null
    std::int64_t z_stride = 0;
    const float* dt_bias = nullptr;  // (d) or null
    float* state = nullptr;          // (num_slots, n, d), slot stride state_stride
    std::int64_t state_stride = 0;
    void* out = nullptr;  // (t, d)
    std::int64_t out_stride = 0;
};

}  // namespace apcbatch
