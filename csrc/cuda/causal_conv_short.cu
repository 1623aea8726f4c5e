// Causal convolution of short sequences, for passes that decode or verify drafts. A thread has four adjacent
// channels. It walks through the tokens of several sequences, and prefetches the next token's inputs during
// each. Arithmetic and order are those of causal_conv, so the bits are the same.
#include <stdexcept>

#include "dependent_launch.cuh"
#include "element.cuh"
#include "launch.h"
#include "quads.cuh"
#include "short_sequences.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {
namespace {

constexpr int kThreads = 64, kChannels = 4;
constexpr std::int64_t kBlocksAtOnce = 2048;

// Raw inputs of four channels, the newest last.
template <class T, int kWidth>
struct Window {
    Quad<T> inputs[kWidth];

    // Loads the inputs before the sequence, as after a step.
    __device__ __forceinline__ void load(const ConvParams& p, std::int64_t slot, std::int64_t c) {
        const T* state = static_cast<const T*>(p.state) + slot * p.state_stride + c;
#pragma unroll
        for (int k = 1; k < kWidth; ++k) {
            inputs[k] = Quad<T>{{T(0.0f), T(0.0f), T(0.0f), T(0.0f)}};
            if (slot >= 0) inputs[k] = *reinterpret_cast<const Quad<T>*>(state + (k - 1) * p.d_inner);
        }
    }

    __device__ __forceinline__ void step(const Quad<T>& input) {
#pragma unroll
        for (int k = 1; k < kWidth; ++k) inputs[k - 1] = inputs[k];
        inputs[kWidth - 1] = input;
    }

    // Writes all inputs except the oldest to the slot.
    __device__ __forceinline__ void write(const ConvParams& p, std::int64_t slot, std::int64_t c) const {
        if (slot < 0) return;
        T* state = static_cast<T*>(p.state) + slot * p.state_stride + c;
#pragma unroll
        for (int k = 1; k < kWidth; ++k) {
            *reinterpret_cast<Quad<T>*>(state + (k - 1) * p.d_inner) = inputs[k];
        }
    }
};

template <class T>
__device__ __forceinline__ Quad<T> input_of(const ConvParams& p, std::int64_t token, std::int64_t c) {
    return *reinterpret_cast<const Quad<T>*>(static_cast<const T*>(p.x) + token * p.x_stride + c);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    causal_conv_short_kernel(const __grid_constant__ ConvParams p, int each, int channel_tiles) {
    __shared__ Where all[kMostSequences];
    let_next_begin();
    const std::int64_t c = (std::int64_t(blockIdx.x % channel_tiles) * kThreads + threadIdx.x) * kChannels;
    const int first = int(blockIdx.x) / channel_tiles * each;
    const int here = min(each, int(p.ragged.num_sequences) - first);
    const bool any = c < p.d_inner;
    float weight[kWidth][kChannels], bias[kChannels] = {};  // in memory, weights are (channel, tap)
    if (any) {
        const float* from = static_cast<const float*>(p.weight) + c * kWidth;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) load<kChannels>(from + k * kChannels, weight[k]);
        if (p.bias) load<kChannels>(static_cast<const float*>(p.bias) + c, bias);
    }
    await_before();
    if (int(threadIdx.x) < here) all[threadIdx.x] = where(p.ragged, first + threadIdx.x);
    __syncthreads();
    if (!any) return;
    Window<T, kWidth> next_window;
    next_window.load(p, all[0].initial, c);
    Quad<T> next = input_of<T>(p, all[0].begin, c);
#pragma unroll 1
    for (int i = 0; i < here; ++i) {
        Window<T, kWidth> window = next_window;
        Snapshots snapshots(p.ragged, all[i]);
        const std::int64_t end = all[i].end;
#pragma unroll 1
        for (std::int64_t token = all[i].begin; token < end; ++token) {
            window.step(next);
            if (token + 1 < end) {
                next = input_of<T>(p, token + 1, c);
            } else if (i + 1 < here) {
                next_window.load(p, all[i + 1].initial, c);
                next = input_of<T>(p, all[i + 1].begin, c);
            }
            float out[kChannels];
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                out[j] = bias[j];
#pragma unroll
                for (int k = 0; k < kWidth; ++k) {
                    const int tap = j * kWidth + k;
                    out[j] = __fmaf_rn(weight[tap / kChannels][tap % kChannels],
                                       widen(window.inputs[k].at[j]), out[j]);
                }
                out[j] = silu(out[j]);
            }
            store<kChannels>(out, static_cast<T*>(p.out) + token * p.out_stride + c);
            window.write(p, snapshots.slot_after(token), c);
        }
        window.write(p, all[i].final, c);
    }
}

template <class T, int kWidth>
void launch(const ConvParams& p, cudaStream_t stream) {
    const std::int64_t tiles = (p.d_inner + kThreads * kChannels - 1) / (kThreads * kChannels);
    const std::int64_t each = sequences_each(p.ragged.num_sequences, tiles, kBlocksAtOnce);
    const std::int64_t groups = (p.ragged.num_sequences + each - 1) / each;
    launch_dependent(causal_conv_short_kernel<T, kWidth>, dim3(unsigned(tiles * groups)), kThreads, 0, stream,
                     "causal_conv_short", p, int(each), int(tiles));
}

template <class T>
void launch_width(const ConvParams& p, cudaStream_t stream) {
    switch (p.width) {
        case 2:
            return launch<T, 2>(p, stream);
        case 3:
            return launch<T, 3>(p, stream);
        case 4:
            return launch<T, 4>(p, stream);
    }
    throw std::invalid_argument("causal_conv_short has 2 to 4 taps; it got " + std::to_string(p.width));
}

}  // namespace

bool takes_conv_short(const ConvParams& p) {
    bool lies = p.width >= 2 && p.width <= 4 && p.weight_dtype == DType::float32 &&
                aligned<float>({{p.weight, 0}, {p.bias, 0}}, p.d_inner, kChannels);
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        lies = lies && aligned<T>({{p.x, p.x_stride}, {p.out, p.out_stride}, {p.state, p.state_stride}},
                                  p.d_inner, kChannels);
    });
    return lies;
}

void causal_conv_short(const ConvParams& p, cudaStream_t stream) {
    with_element(p.dtype, [&](auto element) { launch_width<decltype(element)>(p, stream); });
}

}  // namespace cuda
}  // namespace apcbatch
