// Mixer over heads with matrix states of one layer, its norm included: one call that runs its kernels in
// order. It is a gated delta net or Mamba-2, by its rule (head_scan.h).
//
// Input projection, causal convolution and SiLU over q, k and v, the recurrence, a gated RMS norm, output
// projection. A gated delta net (Yang, Kautz and Hatamizadeh, arXiv 2412.06464, section 3.4) norms each head,
// then multiplies it by SiLU(z). Mamba-2 (Dao and Gu, arXiv 2405.21060, section 7) multiplies by SiLU(z),
// then norms the heads of each key head together; some models norm first, or not at all. In a bfloat16 model
// values are rounded after the input projection, after the SiLU of the convolution and after the gated norm;
// between these everything is float32. The bits equal those of the kernels called one by one.
#pragma once

#include "head_scan.h"
#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// Mixer, filled once per layer. Hk, K: key heads and their columns, Hv, V: value heads and their columns, w:
// taps, h: hidden, c: channels of the convolution, 2 Hk K + Hv V.
struct HeadMixer final : SubBlock {
    PreNorm norm;
    HeadScanParams scan;  // all but ragged, the inputs of each token and out
    ConvParams conv;      // for convolve; state (num_slots, w - 1, c)
    // (c + Hv V + 2 Hv, h), rows of q, k, v, z, b, a; without b in ssd. (h, Hv V)
    Projection in_proj, out_proj;
    const float* head_norm = nullptr;  // delta: (V), ssd: (Hv V) or null for no norm
    float head_norm_eps = 0.0f;
    bool gate_first = false;  // multiplies by SiLU(z) before the norm

    bool is_ssd() const { return scan.rule == HeadRule::ssd; }
    std::int64_t channels() const { return conv.d_inner; }
    std::int64_t keys() const { return scan.key_heads * scan.key_dim; }
    std::int64_t values() const { return scan.value_heads * scan.value_dim; }
    // Columns of b and a, or of a alone.
    std::int64_t gates() const { return (is_ssd() ? 1 : 2) * scan.value_heads; }
    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
    // A kept row is the convolution's raw input (c), its outputs k (Hk K) and v (Hv V), then b and a
    // (gates()).
    std::int64_t kept_bytes() const override;
    std::int64_t replay_bytes(std::int64_t count) const override;
    void replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                char* memory) const override;
};

}  // namespace apcbatch
