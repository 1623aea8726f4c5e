// Depthwise causal convolution and SiLU of one unit (a range of channels of a run of sequences, or of a
// range of tokens of one sequence):
//   out_t = silu(bias + sum_k weight_k x_(t - w + 1 + k)), k ascending, in float32; the sum without has_silu.
// Inputs before the first token come from the initial slot, oldest first, or are zeros. A written slot
// receives the last w - 1 raw inputs, bit for bit.
#pragma once

#include "scan.h"
#include "vmath.h"

namespace apcbatch {
namespace APC_ISA {
namespace conv {

constexpr int64_t kMaxWidth = 8;
static_assert(kMaxWidth <= kTokenGrain, "a part of a sequence finds what it needs in the tokens before it");
// Channels of a tile: their weights and last inputs stay in the L1 cache during the loop over tokens.
constexpr int64_t kTile = 256;

// Computation of one unit. T: type of x, state and out. Scratch: weight (w, channel) and bias (channel) as
// floats, then the inputs before the first token (w - 1, channel).
template <bool kSilu, class T>
class UnitConv {
  public:
    UnitConv(const ConvParams& params, const Unit& unit, float* scratch)
        : p(params), c0(unit.channel_begin), channels(unit.channels), past(params.width - 1) {
        padded = (channels + kLanes - 1) / kLanes * kLanes;
        weight = scratch;
        bias = weight + p.width * padded;
        history = reinterpret_cast<T*>(bias + padded);
        prepare_weight();
    }

    // Processes tokens [token_begin, token_end) of sequence s. The call with the sequence's first tokens
    // writes all of the sequence's slots, so none is written before the initial slot is read.
    void run(int64_t s, int64_t token_begin, int64_t token_end) {
        const int64_t begin = p.ragged.cu_seqlens[s], length = p.ragged.cu_seqlens[s + 1] - begin;
        if (token_end > length) token_end = length;
        x = static_cast<const T*>(p.x) + begin * p.x_stride + c0;
        out = static_cast<T*>(p.out) + begin * p.out_stride + c0;
        if (token_begin == 0) read_state(p.ragged.initial_slots[s]);
        for (int64_t t0 = token_begin; t0 < token_end; t0 += kTileTokens) {
            const int64_t t1 = t0 + kTileTokens < token_end ? t0 + kTileTokens : token_end;
            for (int64_t c = 0; c < channels; c += kTile) {
                const int64_t end = c + kTile < channels ? c + kTile : channels;
                convolve(t0, t1, c, end);
            }
        }
        if (token_begin > 0) return;
        for (int64_t i = p.ragged.snapshot_cu[s]; i < p.ragged.snapshot_cu[s + 1]; ++i) {
            write_state(p.ragged.snapshot_slots[i], p.ragged.snapshot_positions[i]);
        }
        if (p.ragged.final_slots[s] >= 0) write_state(p.ragged.final_slots[s], length);
    }

  private:
    const ConvParams& p;
    const int64_t c0, channels, past;
    int64_t padded;
    float *weight, *bias;
    T* history;
    const T* x;  // row of the sequence's first token, like out
    T* out;

    void prepare_weight() {
        const float* from = p.weight + c0 * p.width;
        for (int64_t c = 0; c < padded; ++c) {
            const bool inside = c < channels;
            bias[c] = inside && p.bias != nullptr ? p.bias[c0 + c] : 0.0f;
            for (int64_t k = 0; k < p.width; ++k) {
                weight[k * padded + c] = inside ? from[c * p.width + k] : 0.0f;
            }
        }
    }

    T* slot(int64_t index, int64_t i) const {
        return static_cast<T*>(p.state) + index * p.state_stride + i * p.d_inner + c0;
    }

    void read_state(int64_t index) {
        for (int64_t i = 0; i < past; ++i) {
            T* to = history + i * padded;
            if (index < 0) {
                memset(to, 0, sizeof(T) * size_t(padded));
            } else {
                memcpy(to, slot(index, i), sizeof(T) * size_t(channels));
            }
        }
    }

    // Returns the raw inputs of token t of the sequence. Tokens -past to -1 are in the history.
    const T* input(int64_t t) const { return t >= 0 ? x + t * p.x_stride : history + (past + t) * padded; }

    // Computes the outputs of tokens [t0, t1) in channels [c, end).
    void convolve(int64_t t0, int64_t t1, int64_t c, int64_t end) const {
        if (p.width == 4) {  // common width: with four tokens at once, each input is loaded half as often
            for (; t0 + 4 <= t1; t0 += 4) convolve_tokens<4, 4>(t0, c, end);
            for (; t0 < t1; ++t0) convolve_tokens<4, 1>(t0, c, end);
        } else {
            for (; t0 < t1; ++t0) convolve_tokens<0, 1>(t0, c, end);
        }
    }

    // Computes kTokens tokens, beginning at t. kWidth: number of taps; 0: use p.width.
    template <int kWidth, int kTokens>
    void convolve_tokens(int64_t t, int64_t c, int64_t end) const {
        const T* inputs[kMaxWidth + kTokens];
        const int64_t count = (kWidth > 0 ? kWidth : p.width) - 1 + kTokens;
        for (int64_t k = 0; k < count; ++k) inputs[k] = input(t - past + k);
        for (; c + kLanes <= end; c += kLanes) {
            Vec window[kMaxWidth + kTokens], y[kTokens];
#pragma GCC unroll 8
            for (int64_t k = 0; k < count; ++k) window[k] = Vec::load(inputs[k] + c);
            sums<kWidth, kTokens>(c, window, y);
            for (int64_t j = 0; j < kTokens; ++j) y[j].store(out + (t + j) * p.out_stride + c);
        }
        if (c < end) {
            Vec window[kMaxWidth + kTokens], y[kTokens];
            for (int64_t k = 0; k < count; ++k) window[k] = load_partial(inputs[k] + c, end - c);
            sums<kWidth, kTokens>(c, window, y);
            for (int64_t j = 0; j < kTokens; ++j) {
                store_partial(y[j], out + (t + j) * p.out_stride + c, end - c);
            }
        }
    }

    template <int kWidth, int kTokens>
    APC_INLINE void sums(int64_t c, const Vec* window, Vec* y) const {
        const int64_t width = kWidth > 0 ? kWidth : p.width;
#pragma GCC unroll 4
        for (int64_t j = 0; j < kTokens; ++j) {
            Vec total = Vec::load(bias + c);
#pragma GCC unroll 4
            for (int64_t k = 0; k < width; ++k)
                total = fma(Vec::load(weight + k * padded + c), window[j + k], total);
            y[j] = kSilu ? silu(total) : total;
        }
    }

    void write_state(int64_t index, int64_t position) const {
        for (int64_t i = 0; i < past; ++i) {
            memcpy(slot(index, i), input(position - past + i), sizeof(T) * size_t(channels));
        }
    }
};

template <bool kSilu, class T>
void run_unit(const ConvParams& params, const Unit& unit, float* scratch) {
    UnitConv<kSilu, T> conv(params, unit, scratch);
    for (int64_t s = unit.sequence_begin; s < unit.sequence_end; ++s)
        conv.run(s, unit.token_begin, unit.token_end);
}

}  // namespace conv

void causal_conv_unit(const ConvParams& params, const Unit& unit, float* scratch) {
    with_type(params.dtype, [&](auto x) {
        using T = TypeOf<decltype(x)>;
        params.has_silu ? conv::run_unit<true, T>(params, unit, scratch)
                        : conv::run_unit<false, T>(params, unit, scratch);
    });
}

}  // namespace APC_ISA
}  // namespace apcbatch
