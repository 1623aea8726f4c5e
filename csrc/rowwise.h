// Row-wise ops: RMS norm, gated RMS norm, the SwiGLU product, the squared ReLU, and top-k, argmax and
// log-probabilities of logits. Arguments and entry points; norm.h and choose.h have the arithmetic.
#pragma once

#include <stdint.h>

#include "instruction_sets.h"
#include "params.h"

namespace apcbatch {

// RMS norm: y = x / sqrt(mean(x^2) + eps) * weight. With a delta, first x += delta in place; x is then
// float32.
struct NormParams {
    int64_t t = 0, h = 0;
    void* x = nullptr;  // (t, h), row stride x_stride; written only with a delta
    int64_t x_stride = 0;
    DType x_dtype = DType::float32;
    const void* delta = nullptr;  // (t, h) or null
    int64_t delta_stride = 0;
    DType delta_dtype = DType::float32;
    const float* weight = nullptr;  // (h) or null
    float eps = 0.0f;
    void* y = nullptr;  // (t, h) contiguous
    DType y_dtype = DType::float32;
};

// Gated RMS norm of each head: y = x / sqrt(mean(x^2) + eps) * weight * silu(gate); without a weight there is
// no norm: y = x * silu(gate).
struct GatedNormParams {
    int64_t t = 0, heads = 0, d = 0;
    bool gate_first = false;   // norm x * silu(gate), in place of gating the norm of x
    const float* x = nullptr;  // (t, heads, d), with a stride for rows and one for heads
    int64_t x_stride = 0, x_head_stride = 0;
    const void* gate = nullptr;  // (t, heads, d), row stride gate_stride
    int64_t gate_stride = 0;
    const float* weight = nullptr;  // (d) of all heads, or (heads, d): weight_stride 0 or d; or null
    int64_t weight_stride = 0;
    float eps = 0.0f;
    void* y = nullptr;             // (t, heads, d) contiguous
    DType dtype = DType::float32;  // of gate and y
};

// SwiGLU product: y = silu(gate) * up, or without silu gate * up. y may be the same memory as gate.
struct SiluMulParams {
    int64_t t = 0, f = 0;
    const void* gate = nullptr;  // (t, f)
    int64_t gate_stride = 0;
    const void* up = nullptr;  // (t, f)
    int64_t up_stride = 0;
    void* y = nullptr;  // (t, f)
    int64_t y_stride = 0;
    DType dtype = DType::float32;
    bool has_silu = true;
};

// Squared ReLU: y = max(x, 0)^2. y may be the same memory as x.
struct ReluSquareParams {
    int64_t t = 0, f = 0;
    const void* x = nullptr;  // (t, f)
    int64_t x_stride = 0;
    void* y = nullptr;  // (t, f)
    int64_t y_stride = 0;
    DType dtype = DType::float32;
};

// Choice of k columns of each row, a token's experts, the lower index first on ties, and their weights.
// Without a bias: the k largest logits, weighted by their softmax over the whole row. With one: the k largest
// scores, sigmoid(logit) + bias, weighted by the sigmoids of these logits, all NaN if a logit or a score of
// the row is not finite; the columns are in equal groups, of which only the top_groups are used whose two
// largest scores have the largest sums. If is_normalised, each weight is then divided by the row's sum of
// weights, added in order, plus eps: sigmoids can all be 0. At last it is multiplied by scale.
struct RoutingParams {
    int64_t t = 0, n = 0, k = 0;
    const float* logits = nullptr;  // (t, n)
    int64_t stride = 0;
    float* weights = nullptr;     // (t, k) contiguous
    int64_t* indices = nullptr;   // (t, k) contiguous
    const float* bias = nullptr;  // (n) or null
    int64_t groups = 1, top_groups = 1;
    bool is_normalised = false;
    float eps = 0.0f, scale = 1.0f;
};

// Log-probability of one token per row: logit - max - log(sum of exp(logit - max)).
struct LogprobParams {
    int64_t t = 0, n = 0;
    const float* logits = nullptr;  // (t, n)
    int64_t stride = 0;
    // true: write to tokens the index of the largest logit, the lowest on ties; for a row that is not finite,
    // write -1, and NaN as its log-probability
    bool choose = false;
    int64_t* tokens = nullptr;  // (t)
    float* logprobs = nullptr;  // (t) or null
};

void rms_norm(const NormParams& params, int num_threads);
void gated_norm(const GatedNormParams& params, int num_threads);
void silu_mul(const SiluMulParams& params, int num_threads);
void relu_square(const ReluSquareParams& params, int num_threads);
void route(const RoutingParams& params, int num_threads);
void logprob(const LogprobParams& params, int num_threads);

// Returns the scratch bytes of softmax_topk_rows: the exponentials of a row. sigmoid_topk_rows needs three
// times these.
constexpr int64_t topk_scratch_bytes(int64_t n) { return 4 * (n + 16); }

#define APC_DECLARE(argument, name, ...)                                                            \
    namespace name {                                                                                \
    void rms_norm_rows(const NormParams& params, int64_t begin, int64_t end);                       \
    void gated_norm_rows(const GatedNormParams& params, int64_t begin, int64_t end);                \
    void silu_mul_rows(const SiluMulParams& params, int64_t begin, int64_t end);                    \
    void relu_square_rows(const ReluSquareParams& params, int64_t begin, int64_t end);              \
    void softmax_topk_rows(const RoutingParams& params, int64_t begin, int64_t end, char* scratch); \
    void sigmoid_topk_rows(const RoutingParams& params, int64_t begin, int64_t end, char* scratch); \
    void logprob_rows(const LogprobParams& params, int64_t begin, int64_t end);                     \
    }
APC_ISAS(APC_DECLARE, )
#undef APC_DECLARE

}  // namespace apcbatch
