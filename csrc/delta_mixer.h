// Gated delta net mixer of one layer, its norm included: one call that runs its kernels in order.
//
// Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3.4: input projection,
// causal convolution and SiLU over q, k and v, the gated delta rule, an RMS norm of each head gated by
// SiLU(z), output projection. In a bfloat16 model values are rounded after the input projection, after the
// SiLU of the convolution and after the gated norm; between these everything is float32. The bits equal
// those of the kernels called one by one.
#pragma once

#include "delta_rule.h"
#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// Delta net mixer, filled once per layer. Hk, K: key heads and their columns, Hv, V: value heads and their
// columns, w: taps, h: hidden, c: channels of the convolution, 2 Hk K + Hv V.
struct DeltaMixer final : SubBlock {
    PreNorm norm;
    DType dtype = DType::float32;  // of the activations and of the convolution's state
    Projection in_proj, out_proj;  // (c + Hv V + 2 Hv, h), rows of q, k, v, z, b, a; (h, Hv V)
    std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
    std::int64_t lanes = 0;              // columns of v in a block of the state
    std::int64_t width = 0;              // w
    const float* conv_weight = nullptr;  // (c, w)
    const float* A = nullptr;            // (Hv), -exp(A_log)
    const float* dt_bias = nullptr;      // (Hv)
    const float* head_norm = nullptr;    // (V)
    float head_norm_eps = 0.0f;
    float* delta = nullptr;  // (num_slots, Hv, V / lanes, K, lanes), slot stride delta_stride
    std::int64_t delta_stride = 0;
    void* conv = nullptr;  // (num_slots, w - 1, c), slot stride conv_stride
    std::int64_t conv_stride = 0;

    std::int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
    // A kept row is the convolution's raw input (c), its outputs k (Hk K) and v (Hv V), then b and a (Hv
    // each).
    std::int64_t kept_bytes() const override;
    std::int64_t replay_bytes(std::int64_t count) const override;
    void replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                char* memory) const override;
};

}  // namespace apcbatch
