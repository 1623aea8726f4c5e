// Mamba-1 mixer of one layer, its norm included: one call that runs its kernels in order.
//
// The order is that of Gu and Dao 2023, Mamba, section 3.4. The bits equal those of the kernels called one by
// one.
#pragma once

#include "linear.h"
#include "sub_block.h"

namespace apcbatch {

// Mamba mixer, filled once per layer. d: d_inner, n: d_state, w: taps, r: dt_rank, h: hidden.
struct MambaMixer final : SubBlock {
    PreNorm norm;
    Projection in_proj, x_proj, dt_proj, out_proj;  // (2d, h), (r + 2n, d), (d, r), (h, d)
    ConvParams conv;                                // for convolve; state (num_slots, w - 1, d)
    ScanParams scan;                                // all but ragged, the inputs of each token and out
    bool has_norms = false;                         // RMS norms of dt, B and C before they are used
    const float *dt_norm = nullptr, *B_norm = nullptr, *C_norm = nullptr;  // (r), (n), (n); null: ones
    float norm_eps = 0.0f;

    std::int64_t scratch_bytes(std::int64_t t) const override;
    void run(const SubBlockInputs& inputs, const Residual& residual, char* memory,
             int num_threads) const override;
    // A kept row is the convolution's raw input (d), its output (d), dt before its bias (d), and B (n).
    std::int64_t kept_bytes() const override;
    std::int64_t replay_bytes(std::int64_t count) const override;
    void replay(const Replay* replays, std::int64_t num_replays, const char* kept,
                char* memory) const override;
};

}  // namespace apcbatch
