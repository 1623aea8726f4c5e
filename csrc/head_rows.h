// Ops on the rows of heads around attention: RMS norm of each head with rotary position embedding, and the
// output gate. Arguments and entry points; head_rows_kernel.h has the arithmetic.
#pragma once

#include <stdint.h>

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

// RMS norm of each head, x / sqrt(mean(x^2) + eps) * weight, then the rotation of its first 2 * pairs
// columns; without a weight the rotation alone: columns i and pairs + i by the angle of the token's position
// and step i. y may be the same memory as x.
struct NormRopeParams {
    int64_t t = 0, heads = 0, head_dim = 0;
    const void* x = nullptr;  // (t, heads, head_dim), token stride x_stride
    int64_t x_stride = 0;
    const float* weight = nullptr;  // (head_dim) or null
    float eps = 0.0f;
    const int64_t* steps = nullptr;  // (pairs): angle per position, in 2^-64 turns
    int64_t pairs = 0;
    const int64_t* positions = nullptr;  // (t): absolute
    void* y = nullptr;                   // (t, heads, head_dim), token stride y_stride
    int64_t y_stride = 0;
    DType dtype = DType::float32;  // of x and y
};

// Output gate: y = x * sigmoid(gate). y may be the same memory as x.
struct SigmoidMulParams {
    int64_t t = 0, h = 0;
    const void* x = nullptr;  // (t, h)
    int64_t x_stride = 0;
    const void* gate = nullptr;  // (t, h)
    int64_t gate_stride = 0;
    void* y = nullptr;  // (t, h)
    int64_t y_stride = 0;
    DType dtype = DType::float32;
};

void norm_rope(const NormRopeParams& params, int num_threads);
void sigmoid_mul(const SigmoidMulParams& params, int num_threads);

// Returns the scratch bytes of norm_rope per thread: a head, and cosine and sine of each angle, all float32
// and padded to whole vectors.
constexpr int64_t norm_rope_scratch_bytes(int64_t head_dim, int64_t pairs) {
    return 4 * (head_dim + 16 + 2 * (pairs + 16));
}

#define APC_DECLARE(argument, name, ...)                                                          \
    namespace name {                                                                              \
    void norm_rope_rows(const NormRopeParams& params, int64_t begin, int64_t end, char* scratch); \
    void sigmoid_mul_rows(const SigmoidMulParams& params, int64_t begin, int64_t end);            \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

}  // namespace apcbatch
