// Depthwise causal convolution over a packed batch:
//   out_t = silu(bias + sum_k weight_k x_(t - w + 1 + k)), k ascending, in float32; the sum without has_silu.
// Inputs before the first token come from the initial slot, oldest first, or are zeros. A written slot
// receives the last w - 1 raw inputs, bit for bit. A thread owns two adjacent channels.
//
// One launch computes the outputs in runs of tokens and only reads slots. A second launch then writes the
// slots, as a sequence may end in the slot that it began with. A batch of short sequences has a kernel of its
// own.
#include <stdexcept>

#include "launch.h"
#include "quads.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

namespace {

constexpr int kConvThreads = 128, kRunTokens = 16;

// Two channels: weights, and the last kWidth raw inputs.
template <class T, int kWidth, bool kPaired>
struct Channels {
    const ConvParams& p;
    std::int64_t c;
    bool both;
    float2 weight[kWidth], bias;
    Pair<T> window[kWidth];  // raw inputs, the newest last

    __device__ __forceinline__ Channels(const ConvParams& params, std::int64_t channel)
        : p(params), c(channel), both(channel + 1 < params.d_inner) {
        const std::int64_t second = both ? c + 1 : c;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            weight[k] = make_float2(p.weight[c * kWidth + k], p.weight[second * kWidth + k]);
        }
        bias = make_float2(0.0f, 0.0f);
        if (p.bias != nullptr) bias = make_float2(p.bias[c], p.bias[second]);
    }

    __device__ __forceinline__ Pair<T> input(std::int64_t token) const {
        return load_pair<T>(static_cast<const T*>(p.x) + token * p.x_stride + c, both, kPaired);
    }

    // Returns the raw input of a sequence's token t, counted from its first token. Negative t are in the
    // slot.
    __device__ __forceinline__ Pair<T> raw(std::int64_t begin, std::int64_t t, std::int64_t slot) const {
        if (t >= 0) return input(begin + t);
        if (slot < 0) return zero_pair(T(0.0f));
        // Does not use the read-only cache, as this thread may write the slot later.
        const T* from =
            static_cast<const T*>(p.state) + slot * p.state_stride + (kWidth - 1 + t) * p.d_inner + c;
        if (kPaired) return *reinterpret_cast<const Pair<T>*>(from);
        return join(from[0], both ? from[1] : T(0.0f));
    }

    // Loads the kWidth - 1 inputs before token t into window[1] and up; `step` shifts them down.
    __device__ __forceinline__ void recall(std::int64_t begin, std::int64_t t, std::int64_t slot) {
#pragma unroll
        for (int k = 0; k < kWidth - 1; ++k) window[k + 1] = raw(begin, t - (kWidth - 1) + k, slot);
    }

    __device__ __forceinline__ void step(std::int64_t token) {
#pragma unroll
        for (int k = 0; k < kWidth - 1; ++k) window[k] = window[k + 1];
        window[kWidth - 1] = input(token);
        float2 sum = bias;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
            const float2 in = widen_pair<T>(window[k]);
            sum = make_float2(__fmaf_rn(weight[k].x, in.x, sum.x), __fmaf_rn(weight[k].y, in.y, sum.y));
        }
        if (p.has_silu) sum = make_float2(silu(sum.x), silu(sum.y));
        store_pair<T>(static_cast<T*>(p.out) + token * p.out_stride + c, sum, both, kPaired);
    }

    __device__ __forceinline__ void write(std::int64_t slot, const Pair<T> (&tail)[kWidth]) const {
        T* to = static_cast<T*>(p.state) + slot * p.state_stride + c;
#pragma unroll
        for (int k = 0; k < kWidth - 1; ++k, to += p.d_inner) {
            if (kPaired) {
                *reinterpret_cast<Pair<T>*>(to) = tail[k];
                continue;
            }
            const T* pair = reinterpret_cast<const T*>(&tail[k]);
            to[0] = pair[0];
            if (both) to[1] = pair[1];
        }
    }

    // Writes the slots of a sequence. Nothing may read its initial slot afterwards.
    __device__ __forceinline__ void write_slots(std::int64_t sequence, std::int64_t begin,
                                                std::int64_t length) {
        const RaggedParams& ragged = p.ragged;
        const std::int64_t initial = ragged.initial_slots[sequence], final = ragged.final_slots[sequence];
        const std::int64_t first = ragged.snapshot_cu[sequence], end = ragged.snapshot_cu[sequence + 1];
        Pair<T> before[kWidth], tail[kWidth];  // before: copy of the initial slot, which may be overwritten
#pragma unroll
        for (int k = 0; k < kWidth - 1; ++k) before[k] = raw(begin, k - (kWidth - 1), initial);
        for (std::int64_t i = first; i < end + (final >= 0); ++i) {
            const std::int64_t position = i < end ? ragged.snapshot_positions[i] : length;
#pragma unroll
            for (int k = 0; k < kWidth - 1; ++k) {
                const std::int64_t t = position - (kWidth - 1) + k;
                tail[k] = t >= 0 ? input(begin + t) : zero_pair(T(0.0f));
#pragma unroll
                for (int j = 0; j < kWidth - 1; ++j) {
                    if (t == j - (kWidth - 1)) tail[k] = before[j];
                }
            }
            write(i < end ? ragged.snapshot_slots[i] : final, tail);
        }
    }
};

// Returns the sequence of packed token t.
__device__ __forceinline__ std::int64_t sequence_of(const RaggedParams& ragged, std::int64_t t) {
    std::int64_t low = 0, high = ragged.num_sequences;
    while (high - low > 1) {
        const std::int64_t middle = (low + high) / 2;
        (ragged.cu_seqlens[middle] <= t ? low : high) = middle;
    }
    return low;
}

template <class T, int kWidth, bool kPaired>
__global__ void __launch_bounds__(kConvThreads)
    conv_runs_kernel(const __grid_constant__ ConvParams p, std::int64_t num_tokens, int channel_tiles) {
    const std::int64_t c = 2 * (std::int64_t(blockIdx.x % channel_tiles) * kConvThreads + threadIdx.x);
    std::int64_t t = std::int64_t(blockIdx.x / channel_tiles) * kRunTokens;
    if (c >= p.d_inner) return;
    const std::int64_t end = min(t + kRunTokens, num_tokens);
    Channels<T, kWidth, kPaired> channels(p, c);
    std::int64_t sequence = sequence_of(p.ragged, t), begin = p.ragged.cu_seqlens[sequence];
    while (t < end) {
        const std::int64_t stop = min(end, p.ragged.cu_seqlens[sequence + 1]);
        channels.recall(begin, t - begin, p.ragged.initial_slots[sequence]);
#pragma unroll 4
        for (; t < stop; ++t) channels.step(t);
        begin = stop;
        ++sequence;
    }
}

// A thread writes two channels of a sequence's slots.
template <class T, int kWidth, bool kPaired>
__global__ void __launch_bounds__(kConvThreads)
    conv_slots_kernel(const __grid_constant__ ConvParams p, int channel_tiles) {
    const std::int64_t c = 2 * (std::int64_t(blockIdx.x % channel_tiles) * kConvThreads + threadIdx.x);
    const std::int64_t sequence = blockIdx.x / channel_tiles;
    if (c >= p.d_inner) return;
    Channels<T, kWidth, kPaired> channels(p, c);
    const std::int64_t begin = p.ragged.cu_seqlens[sequence], end = p.ragged.cu_seqlens[sequence + 1];
    channels.write_slots(sequence, begin, end - begin);
}

template <class T, int kWidth, bool kPaired>
void launch(const ConvParams& p, std::int64_t num_tokens, cudaStream_t stream) {
    const std::int64_t tiles = (p.d_inner + 2 * kConvThreads - 1) / (2 * kConvThreads);
    const unsigned sequences = unsigned(tiles * p.ragged.num_sequences);
    const unsigned runs = unsigned(tiles * ((num_tokens + kRunTokens - 1) / kRunTokens));
    conv_runs_kernel<T, kWidth, kPaired><<<runs, kConvThreads, 0, stream>>>(p, num_tokens, int(tiles));
    check_launch("causal_conv");
    conv_slots_kernel<T, kWidth, kPaired><<<sequences, kConvThreads, 0, stream>>>(p, int(tiles));
    check_launch("causal_conv's slots");
}

template <class T, bool kPaired>
void launch_width(const ConvParams& p, std::int64_t num_tokens, cudaStream_t stream) {
    switch (p.width) {
        case 1:
            return launch<T, 1, kPaired>(p, num_tokens, stream);
        case 2:
            return launch<T, 2, kPaired>(p, num_tokens, stream);
        case 3:
            return launch<T, 3, kPaired>(p, num_tokens, stream);
        case 4:
            return launch<T, 4, kPaired>(p, num_tokens, stream);
        case 5:
            return launch<T, 5, kPaired>(p, num_tokens, stream);
        case 6:
            return launch<T, 6, kPaired>(p, num_tokens, stream);
        case 7:
            return launch<T, 7, kPaired>(p, num_tokens, stream);
        case 8:
            return launch<T, 8, kPaired>(p, num_tokens, stream);
    }
    throw std::invalid_argument("the CUDA convolution has 1 to 8 taps; it got " + std::to_string(p.width));
}

template <class T>
void launch_dtype(const ConvParams& p, std::int64_t num_tokens, cudaStream_t stream) {
    if (aligned<T>({{p.x, p.x_stride}, {p.out, p.out_stride}, {p.state, p.state_stride}}, p.d_inner, 2)) {
        launch_width<T, true>(p, num_tokens, stream);
    } else {
        launch_width<T, false>(p, num_tokens, stream);
    }
}

}  // namespace

void causal_conv(const ConvParams& p, const Batch& batch, cudaStream_t stream) {
    const std::int64_t num_tokens = batch.num_tokens;
    if (num_tokens == 0) return;
    if (batch.num_longer == 0 && takes_conv_short(p)) return causal_conv_short(p, batch, stream);
    with_element(p.dtype, [&](auto element) { launch_dtype<decltype(element)>(p, num_tokens, stream); });
}

}  // namespace cuda
}  // namespace apcbatch
