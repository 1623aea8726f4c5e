// Selective scan of short sequences, for passes that decode or verify drafts. A thread has one channel or
// two. It walks through the tokens of its block's sequences in tiles, and loads the next tile's inputs during
// each; B and C go through shared memory. Arithmetic and order are those of selective_scan, so the bits are
// the same.
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
constexpr std::int64_t kThreadsToFill = 384;  // of a multiprocessor, with two channels each

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

// Operands of a tile: those of a thread's adjacent channels, and the thread's share of B and C.
template <class T, int kChannels, int kTokens>
struct Operands {
    static constexpr int kRow = 2 * kStatesAtOnce;  // B, then C
    static constexpr int kShare = (kTokens * kRow + kThreads - 1) / kThreads;
    Group<T, kChannels> x[kTokens], dt[kTokens], z[kTokens];
    T share[kShare];

    __device__ __forceinline__ void load(const ScanParams& p, const Tile& tile, std::int64_t c) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            const std::int64_t token = tile.first + t;
            const bool present = t < tile.count;
            x[t] = group(present, p.x, token * p.x_stride + c);
            dt[t] = group(present, p.dt, token * p.dt_stride + c);
            z[t] = group(present && p.z, p.z, token * p.z_stride + c);
        }
#pragma unroll
        for (int k = 0; k < kShare; ++k) {
            const int t = (int(threadIdx.x) + k * kThreads) / kRow, n = int(threadIdx.x) % kStatesAtOnce;
            const std::int64_t token = tile.first + t;
            const T* row = of_C() ? static_cast<const T*>(p.C) + token * p.C_stride
                                  : static_cast<const T*>(p.B) + token * p.B_stride;
            share[k] = T(0.0f);
            if (t < tile.count && n < p.d_state) share[k] = row[n];
        }
    }

    // Writes B and C of the tile to `rows`, each (16,) float32. Absent states get B = 0 and C = -0.
    __device__ __forceinline__ void put(const ScanParams& p, float* rows) const {
#pragma unroll
        for (int k = 0; k < kShare; ++k) {
            const bool present = int(threadIdx.x) % kStatesAtOnce < p.d_state;
            rows[int(threadIdx.x) + k * kThreads] = present ? widen(share[k]) : of_C() ? -0.0f : 0.0f;
        }
    }

  private:
    static __device__ __forceinline__ bool of_C() { return int(threadIdx.x) % kRow >= kStatesAtOnce; }

    static __device__ __forceinline__ Group<T, kChannels> group(bool present, const void* base,
                                                                std::int64_t i) {
        Group<T, kChannels> loaded = {};
        if (present) loaded = *reinterpret_cast<const Group<T, kChannels>*>(static_cast<const T*>(base) + i);
        return loaded;
    }
};

// Reads 16 values of shared memory.
__device__ __forceinline__ void read(const float* from, float (&to)[kStatesAtOnce]) {
#pragma unroll
    for (int i = 0; i < kStatesAtOnce; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

template <class T, int kChannels, int kTokens>
__global__ void __launch_bounds__(kThreads, 6)
    selective_scan_short_kernel(const __grid_constant__ ScanParams p, const std::int64_t* sequences,
                                const std::int64_t* present, int count, int each, int channel_tiles) {
    using Row = Operands<T, kChannels, kTokens>;
    __shared__ Where all[kMostSequences];
    __shared__ SlotTable table;
    __shared__ alignas(16) float rows[2][Row::kShare * kThreads];
    let_next_begin();
    const std::int64_t own = (std::int64_t(blockIdx.x % channel_tiles) * kThreads + threadIdx.x) * kChannels;
    const int first = int(blockIdx.x) / channel_tiles * each, here = min(each, count - first);
    const bool any = own < p.d_inner;
    const std::int64_t c = any ? own : 0;  // a thread without a channel only loads
    float rate[kChannels][kStatesAtOnce], bias[kChannels], D[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
#pragma unroll
        for (int n = 0; n < kStatesAtOnce; ++n) {
            rate[j][n] = rate_of(n < p.d_state ? __ldg(p.A + n * p.d_inner + c + j) : 0.0f);
        }
        bias[j] = p.dt_bias ? __ldg(p.dt_bias + c + j) : 0.0f;
        D[j] = p.D ? __ldg(p.D + c + j) : 0.0f;
    }
    await_before();
    if (int(threadIdx.x) < here) all[threadIdx.x] = where(p.ragged, sequences[first + threadIdx.x]);
    __syncthreads();
    if (is_padding(present, all[0], each)) return;
    States<kChannels> states, next_states;
    Row next;
    Tile tile = tile_at<kTokens>(all, 0, all[0].begin);
    next_states.load(p, all[0].initial, c);
    next.load(p, tile, c);
#pragma unroll 1
    for (int odd = 0; tile.i < here; odd = 1 - odd) {
        const Where at = all[tile.i];
        const Tile after = tile_after<kTokens>(all, tile, here);
        const std::int64_t begun = tile.first - at.begin;  // tokens of the sequence before the tile
        if (begun == 0) states = next_states;
        if (begun % kTableTokens == 0) table.fill(p.ragged, at, tile.first, at.end);
        next.put(p, rows[odd]);
        float in[kTokens][kChannels], step[kTokens][kChannels], gate[kTokens][kChannels];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                in[t][j] = widen(next.x[t].at[j]);
                step[t][j] = __fadd_rn(widen(next.dt[t].at[j]), bias[j]);
                gate[t][j] = widen(next.z[t].at[j]);
            }
        }
        __syncthreads();  // the tile before the last one was read, so that one barrier suffices
        if (after.i < here) {
            if (after.i != tile.i) next_states.load(p, all[after.i].initial, c);
            next.load(p, after, c);
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            if (t >= tile.count) break;
            float B[kStatesAtOnce], C[kStatesAtOnce];
            read(rows[odd] + t * Row::kRow, B);
            read(rows[odd] + t * Row::kRow + kStatesAtOnce, C);
            Group<T, kChannels> out;
#pragma unroll
            for (int j = 0; j < kChannels; ++j) {
                const float by = softplus(step[t][j]);
                float y = step_states(states.h[j], rate[j], by, __fmul_rn(by, in[t][j]), B, C);
                y = __fmaf_rn(D[j], in[t][j], y);
                if (p.z) y = __fmul_rn(y, silu(gate[t][j]));
                out.at[j] = narrow<T>(y);
            }
            if (!any) continue;
            const std::int64_t to = (tile.first + t) * p.out_stride + c;
            *reinterpret_cast<Group<T, kChannels>*>(static_cast<T*>(p.out) + to) = out;
            states.store(p, table.slot_after(at, begun + t), c);
        }
        if (any && tile.first + tile.count == at.end) states.store(p, at.final, c);
        tile = after;
    }
}

template <class T>
bool lies_in_pairs(const ScanParams& p) {
    return aligned<T>({{p.x, p.x_stride}, {p.dt, p.dt_stride}, {p.z, p.z_stride}, {p.out, p.out_stride}},
                      p.d_inner, 2) &&
           aligned<float>({{p.state, p.state_stride}}, p.d_inner, 2);
}

template <class T, int kChannels, int kTokens>
void launch_tokens(const ScanParams& p, const Batch& batch, cudaStream_t stream) {
    const std::int64_t count = p.ragged.num_sequences - batch.num_longer;
    const std::int64_t tiles = (p.d_inner + kThreads * kChannels - 1) / (kThreads * kChannels);
    const std::int64_t each = sequences_each(count, batch.longest, tiles, kBlocksAtOnce);
    const std::int64_t groups = (count + each - 1) / each;
    launch_dependent(selective_scan_short_kernel<T, kChannels, kTokens>, dim3(unsigned(tiles * groups)),
                     kThreads, 0, stream, "selective_scan_short", p, batch.order + batch.num_longer,
                     batch.present, int(count), int(each), int(tiles));
}

template <class T, int kChannels>
void launch(const ScanParams& p, const Batch& batch, cudaStream_t stream) {
    batch.longest == 1 ? launch_tokens<T, kChannels, 1>(p, batch, stream)
                       : launch_tokens<T, kChannels, kTileTokens>(p, batch, stream);
}

}  // namespace

bool takes_scan_short(const ScanParams& p) { return p.d_state <= kStatesAtOnce; }

void selective_scan_short(const ScanParams& p, const Batch& batch, cudaStream_t stream) {
    const std::int64_t count = p.ragged.num_sequences - batch.num_longer;
    if (count == 0) return;
    const int multiprocessors = attribute_of_device(cudaDevAttrMultiProcessorCount);
    const bool fills_device = p.d_inner * count > 2 * kThreadsToFill * multiprocessors;
    with_element(p.dtype, [&](auto element) {
        using T = decltype(element);
        fills_device&& lies_in_pairs<T>(p) ? launch<T, 2>(p, batch, stream) : launch<T, 1>(p, batch, stream);
    });
}

}  // namespace cuda
}  // namespace apcbatch
