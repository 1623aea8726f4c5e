// Selective scan of short sequences, for passes that decode or verify drafts. A thread has one channel or
// two. It walks through the tokens of several sequences, and prefetches the next token's inputs during each.
// Arithmetic and order are those of selective_scan, so the bits are the same.
#include "dependent_launch.cuh"
#include "element.cuh"
#include "launch.h"
#include "quads.cuh"
#include "short_sequences.cuh"
#include "step_state.cuh"

namespace apcbatch {
namespace cuda {

namespace {

constexpr int kThreads = 64;
constexpr std::int64_t kBlocksAtOnce = 768;

// States of a thread's adjacent channels. Loads and stores are streaming (evict-first in the caches), as
// states are not read again in the pass.
template <int kChannels>
struct States {
    float h[kChannels][kStatesAtOnce];

    __device__ __forceinline__ void load(const ScanParams& p, std::int64_t slot, std::int64_t c) {
        const float* from = p.state + slot * p.state_stride + c;
#pragma unroll
        for (int n = 0; n < kStatesAtOnce; ++n) {
            const bool present = n < p.d_state && slot >= 0;
            if constexpr (kChannels == 2) {
                float2 both = make_float2(0.0f, 0.0f);
                if (present) both = __ldcs(reinterpret_cast<const float2*>(from + n * p.d_inner));
                h[0][n] = both.x;
                h[1][n] = both.y;
            } else {
                h[0][n] = present ? __ldcs(from + n * p.d_inner) : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void store(const ScanParams& p, std::int64_t slot, std::int64_t c) const {
        if (slot < 0) return;
        float* to = p.state + slot * p.state_stride + c;
#pragma unroll
        for (int n = 0; n < kStatesAtOnce; ++n, to += p.d_inner) {
            if (n >= p.d_state) break;
            if constexpr (kChannels == 2) {
                __stcs(reinterpret_cast<float2*>(to), make_float2(h[0][n], h[1][n]));
            } else {
                __stcs(to, h[0][n]);
            }
        }
    }
};

// Operands of one token for a thread's adjacent channels.
template <class T, int kChannels>
struct Token {
    Group<T, kChannels> x, dt, z;
    T B[kStatesAtOnce], C[kStatesAtOnce];

    __device__ __forceinline__ void load(const ScanParams& p, std::int64_t token, std::int64_t c) {
        x = group(p.x, token * p.x_stride + c);
        dt = group(p.dt, token * p.dt_stride + c);
        z = {};
        if (p.z) z = group(p.z, token * p.z_stride + c);
        row(static_cast<const T*>(p.B) + token * p.B_stride, int(p.d_state), 0.0f, B);
        row(static_cast<const T*>(p.C) + token * p.C_stride, int(p.d_state), -0.0f, C);
    }

  private:
    static __device__ __forceinline__ Group<T, kChannels> group(const void* base, std::int64_t i) {
        return *reinterpret_cast<const Group<T, kChannels>*>(static_cast<const T*>(base) + i);
    }

    // Loads 16 elements, four at a time if they are aligned.
    static __device__ __forceinline__ void row(const T* from, int n, float absent, T (&to)[kStatesAtOnce]) {
        if (n == kStatesAtOnce && reinterpret_cast<std::uintptr_t>(from) % sizeof(Quad<T>) == 0) {
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; i += 4) {
                const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(from + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) to[i + j] = quad.at[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < kStatesAtOnce; ++i) to[i] = i < n ? from[i] : narrow<T>(absent);
        }
    }
};

template <class T, int kChannels>
__global__ void __launch_bounds__(kThreads, 6)
    selective_scan_short_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences,
                                int count, int each, int channel_tiles) {
    __shared__ Where all[kMostSequences];
    let_next_begin();
    const std::int64_t tile = blockIdx.x % channel_tiles, c = (tile * kThreads + threadIdx.x) * kChannels;
    const int first = int(blockIdx.x) / channel_tiles * each, here = min(each, count - first);
    const bool any = c < p.d_inner;
    float rate[kChannels][kStatesAtOnce], bias[kChannels], D[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
#pragma unroll
        for (int n = 0; n < kStatesAtOnce; ++n) {
            rate[j][n] = rate_of(any && n < p.d_state ? __ldg(p.A + n * p.d_inner + c + j) : 0.0f);
        }
        bias[j] = any && p.dt_bias ? __ldg(p.dt_bias + c + j) : 0.0f;
        D[j] = any && p.D ? __ldg(p.D + c + j) : 0.0f;
    }
    await_before();
    if (int(threadIdx.x) < here) all[threadIdx.x] = where(p.ragged, sequences[first + threadIdx.x]);
    __syncthreads();
    if (!any) return;
    States<kChannels> next_states;
    Token<T, kChannels> next;
    next_states.load(p, all[0].initial, c);
    next.load(p, all[0].begin, c);
#pragma unroll 1
    for (int i = 0; i < here; ++i) {
        States<kChannels> states = next_states;
        Snapshots snapshots(p.ragged, all[i]);
        const std::int64_t end = all[i].end;
#pragma unroll 1
        for (std::int64_t token = all[i].begin; token < end; ++token) {
            const Group<T, kChannels> x = next.x, dt = next.dt, z = next.z;
            float B[kStatesAtOnce], C[kStatesAtOnce];
#pragma unroll
            for (int n = 0; n < kStatesAtOnce; ++n) {
                B[n] = widen(next.B[n]);
                C[n] = widen(next.C[n]);
            }
            if (token + 1 < end) {
                next.load(p, token + 1, c);
            } else if (i + 1 < here) {
                next_states.load(p, all[i + 1].initial, c);
                next.load(p, all[i + 1].begin, c);
            }
            Group<T, kChannels> out;
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                const float in = widen(x.at[j]), step = softplus(__fadd_rn(widen(dt.at[j]), bias[j]));
                float y = step_states(states.h[j], rate[j], step, __fmul_rn(step, in), B, C);
                y = __fmaf_rn(D[j], in, y);
                if (p.z) y = __fmul_rn(y, silu(widen(z.at[j])));
                out.at[j] = narrow<T>(y);
            }
            *reinterpret_cast<Group<T, kChannels>*>(static_cast<T*>(p.out) + token * p.out_stride + c) = out;
            states.store(p, snapshots.slot_after(token), c);
        }
        states.store(p, all[i].final, c);
    }
}

template <class T>
bool lies_in_pairs(const ScanParams& p) {
    return aligned<T>({{p.x, p.x_stride}, {p.dt, p.dt_stride}, {p.z, p.z_stride}, {p.out, p.out_stride}},
                      p.d_inner, 2) &&
           aligned<float>({{p.state, p.state_stride}}, p.d_inner, 2);
}

template <class T, int kChannels>
void launch(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    const std::int64_t tiles = (p.d_inner + kThreads * kChannels - 1) / (kThreads * kChannels);
    const std::int64_t each = sequences_each(selection.count, tiles, kBlocksAtOnce);
    const std::int64_t groups = (selection.count + each - 1) / each;
    launch_dependent(selective_scan_short_kernel<T, kChannels>, dim3(unsigned(tiles * groups)), kThreads, 0,
                     stream, "selective_scan_short", p, selection.sequences, int(selection.count), int(each),
                     int(tiles));
}

}  // namespace

bool takes_scan_short(const ScanParams& p) { return p.d_state <= kStatesAtOnce; }

void selective_scan_short(const ScanParams& p, const Selection& selection, cudaStream_t stream) {
    if (selection.count == 0) return;
    const int multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
    const bool fills_device = p.d_inner * selection.count > 2 * kThreads * multiprocessors;
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        fills_device&& lies_in_pairs<T>(p) ? launch<T, 2>(p, selection, stream)
                                           : launch<T, 1>(p, selection, stream);
    });
}

}  // namespace cuda
}  // namespace apcbatch
