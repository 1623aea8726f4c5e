// Causal convolution of short sequences, for passes that decode or verify drafts. A thread has four adjacent
// channels. It walks through a part of a sequence, or through several sequences of one token, in tiles, and
// loads the next tile's inputs during each. Arithmetic and order are those of causal_conv, so the bits are
// the same.
#include <stdexcept>

#include "async_copy.cuh"
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
constexpr std::int64_t kPartTokens = 16;  // of a sequence, at least a window

// Raw inputs of four channels, the newest last.
template <class T, int kWidth>
struct Window {
    Quad<T> inputs[kWidth];

    // Loads the inputs before token `first` of a sequence, as after a step: the state if it is the sequence's
    // first token, otherwise inputs of the sequence.
    __device__ __forceinline__ void load(const ConvParams& p, const Where& at, std::int64_t first,
                                         std::int64_t c) {
        const bool begins = first == at.begin;
        const T* state = static_cast<const T*>(p.state) + at.initial * p.state_stride + c;
        const T* x = static_cast<const T*>(p.x) + (first - (kWidth - 1)) * p.x_stride + c;
#pragma unroll
        for (int k = 1; k < kWidth; ++k) {
            inputs[k] = Quad<T>{{T(0.0f), T(0.0f), T(0.0f), T(0.0f)}};
            const T* from = begins ? state + (k - 1) * p.d_inner : x + (k - 1) * p.x_stride;
            if (!begins || at.initial >= 0) inputs[k] = *reinterpret_cast<const Quad<T>*>(from);
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
struct Inputs {
    Quad<T> x[kTileTokens];

    __device__ __forceinline__ void load(const ConvParams& p, const Tile& tile, std::int64_t c) {
#pragma unroll
        for (int t = 0; t < kTileTokens; ++t) {
            const T* from = static_cast<const T*>(p.x) + (tile.first + t) * p.x_stride + c;
            if (t < tile.count) x[t] = *reinterpret_cast<const Quad<T>*>(from);
        }
    }
};

// Grid: channel tiles, groups of `each` sequences, parts of kPartTokens tokens of a sequence. The first part
// of a sequence writes its final state, since only that part reads the initial one, which may have the same
// slot.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    causal_conv_short_kernel(const __grid_constant__ ConvParams p, const std::int64_t* present, int each) {
    __shared__ Where all[kMostSequences];  // `end`: of the part
    __shared__ std::int64_t ends[kMostSequences];
    __shared__ SlotTable table;
    let_next_begin();
    const std::int64_t own = (std::int64_t(blockIdx.x) * kThreads + threadIdx.x) * kChannels;
    const int first = int(blockIdx.y) * each, here = min(each, int(p.ragged.num_sequences) - first);
    const bool any = own < p.d_inner;
    const std::int64_t c = any ? own : 0;  // a thread without channels only loads
    const std::int64_t before = std::int64_t(blockIdx.z) * kPartTokens;
    float weight[kWidth][kChannels], bias[kChannels] = {};  // in memory, weights are (channel, tap)
    const float* from = p.weight + c * kWidth;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) load<kChannels>(from + k * kChannels, weight[k]);
    if (p.bias) load<kChannels>(p.bias + c, bias);
    if (int(threadIdx.x) < here) {  // no kernel of a pass writes its lists
        Where at = where(p.ragged, first + threadIdx.x);
        ends[threadIdx.x] = at.end;
        at.end = min(at.end, at.begin + before + kPartTokens);
        all[threadIdx.x] = at;
    }
    __syncthreads();
    const bool is_absent = all[0].begin + before >= all[0].end ||  // there is no such part
                           is_padding(present, all[0], each);
    if (before == 0 && all[0].initial >= 0) {
#pragma unroll
        for (int k = 0; k + 1 < kWidth; ++k) {
            prefetch(static_cast<const T*>(p.state) + all[0].initial * p.state_stride + k * p.d_inner + c);
        }
    }
    await_before();
    if (is_absent) return;
    Window<T, kWidth> window, next_window;
    Inputs<T> next;
    Tile tile = tile_at(all, 0, all[0].begin + before);
    next_window.load(p, all[0], tile.first, c);
    next.load(p, tile, c);
    int last = -1;  // the sequence of the last tile
#pragma unroll 1
    while (tile.i < here) {
        const Where at = all[tile.i];
        const Inputs<T> now = next;
        const Tile after = tile_after(all, tile, here);
        if (tile.i != last) {
            window = next_window;
            table.fill(p.ragged, at, tile.first, at.end);
            if (any && before == 0 && at.end < ends[tile.i]) {
                Window<T, kWidth> final;
                final.load(p, at, ends[tile.i], c);
                final.write(p, at.final, c);
            }
        }
        last = tile.i;
        if (after.i < here) {
            if (after.i != tile.i) next_window.load(p, all[after.i], after.first, c);
            next.load(p, after, c);
        }
        const std::int64_t begun = tile.first - at.begin - before;
#pragma unroll
        for (int t = 0; t < kTileTokens; ++t) {
            if (t >= tile.count) break;
            window.step(now.x[t]);
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
                if (p.has_silu) out[j] = silu(out[j]);
            }
            if (!any) continue;
            store<kChannels>(out, static_cast<T*>(p.out) + (tile.first + t) * p.out_stride + c);
            window.write(p, table.slot_after(at, begun + t), c);
        }
        const bool ends_here = before == 0 && tile.first + tile.count == ends[tile.i];
        if (any && ends_here) window.write(p, at.final, c);
        tile = after;
    }
}

template <class T, int kWidth>
void launch(const ConvParams& p, const Batch& batch, cudaStream_t stream) {
    const std::int64_t sequences = p.ragged.num_sequences;
    const std::int64_t tiles = (p.d_inner + kThreads * kChannels - 1) / (kThreads * kChannels);
    const std::int64_t parts = (batch.longest + kPartTokens - 1) / kPartTokens;
    const std::int64_t each = parts > 1 ? 1 : sequences_each(sequences, batch.longest, tiles, kBlocksAtOnce);
    const dim3 grid(unsigned(tiles), unsigned((sequences + each - 1) / each), unsigned(parts));
    launch_dependent(causal_conv_short_kernel<T, kWidth>, grid, kThreads, 0, stream, "causal_conv_short", p,
                     batch.present, int(each));
}

template <class T>
void launch_width(const ConvParams& p, const Batch& batch, cudaStream_t stream) {
    switch (p.width) {
        case 2:
            return launch<T, 2>(p, batch, stream);
        case 3:
            return launch<T, 3>(p, batch, stream);
        case 4:
            return launch<T, 4>(p, batch, stream);
    }
    throw std::invalid_argument("causal_conv_short has 2 to 4 taps; it got " + std::to_string(p.width));
}

}  // namespace

bool takes_conv_short(const ConvParams& p) {
    bool lies =
        p.width >= 2 && p.width <= 4 && aligned<float>({{p.weight, 0}, {p.bias, 0}}, p.d_inner, kChannels);
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        lies = lies && aligned<T>({{p.x, p.x_stride}, {p.out, p.out_stride}, {p.state, p.state_stride}},
                                  p.d_inner, kChannels);
    });
    return lies;
}

void causal_conv_short(const ConvParams& p, const Batch& batch, cudaStream_t stream) {
    with_element(p.dtype, [&](auto element) { launch_width<decltype(element)>(p, batch, stream); });
}

}  // namespace cuda
}  // namespace apcbatch
