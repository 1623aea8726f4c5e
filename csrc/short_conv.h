// Gated short convolution of one layer, its norm included: one call that runs its kernels in order.
//
// y = out_proj(C * conv(B * x)), with B, C and x from one input projection; the convolution is depthwise and
// causal, without an activation (Liquid AI, "LFM2 Technical Report", arXiv 2511.23404). In a
// bfloat16 model each projection, product and convolution is rounded; between these everything is float32.
#pragma once

#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// Mixer, filled once per layer. h: hidden, w: taps.
struct ShortConv final : SubBlock {
    PreNorm norm;
    ConvParams conv;               // for convolve; state (num_slots, w - 1, h)
    Projection in_proj, out_proj;  // (3h, h), rows of B, C, x; (h, h)

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
    // A kept row is the convolution's input, B * x (h).
    std::int64_t kept_bytes() const override;
    void replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                char* memory) const override;
};

}  // namespace apcbatch
