// One tile of tokens of the selective scan, as the threads see it that prepare it for the walk and finish it
// afterwards: raw inputs copied ahead into shared memory, the steps prepared from them, the sums and the
// gate. scan_walk.cuh goes over the tokens. Must not know: sequences, slots.
#pragma once

#include "element.cuh"
#include "vector_math.cuh"

namespace apcbatch {
namespace cuda {

// The sizes of one kernel: elements T, N states a lane, S lanes a channel, K channels a lane.
//
// A block has W warps that walk over the tokens, each with channels of its own, and H warps that help them:
// they copy inputs, prepare steps and finish sums while the walkers are at another tile. With H = 0 the
// walkers do that themselves, in turn.
template <class Element, int kStates, int kLanes, int kChannels, int kWalkers, int kHelpers>
struct Shape {
    using T = Element;
    static constexpr int N = kStates, S = kLanes, K = kChannels, W = kWalkers, H = kHelpers;
    static constexpr int states = N * S, threads = 32 * (W + H);
    static constexpr int blocks_at_once = H == 0   ? 12 / W
                                          : N == 8 ? 2
                                                   : 1;  // a multiprocessor: bounds the registers
    static constexpr int warp_channels = K * 32 / S, channels = W * warp_channels;
    static constexpr int tokens = H == 0 ? 16 : N == 2 ? 64 : 32;
    static constexpr int unroll = N == 2 ? 4 : N == 4 ? 2 : 1;  // tokens of one block of the walk
    static constexpr int rows = tokens + 2 * unroll;            // the walk reads two blocks ahead
    // The steps lie in the blocks of the walk: dt by channel and token, then dt x.
    static constexpr int inputs = channels * unroll, step_block = 2 * inputs;
    static constexpr int sum_warp =
        32 * K + 4;  // threads that read neighbouring channels meet different banks
    static constexpr int sum_row = W * sum_warp;
    static constexpr int bc_row = 2 * states;
    // The threads that prepare and finish, and how many buffers let them be at other tiles than the walk.
    static constexpr int helping = 32 * (H == 0 ? W : H), buffers = H == 0 ? 1 : 2, raw_buffers = 2 * buffers;
    static constexpr int row_pairs = channels / 2, rows_at_once = helping / row_pairs;
    static constexpr int pairs =
        tokens / rows_at_once;  // of channels, that each of these threads has in a tile
    static_assert(K <= 2 && helping % row_pairs == 0 && tokens % rows_at_once == 0 &&
                  tokens % (4 * unroll) == 0);
};

template <class Sh>
struct SharedMemory {
    using T = typename Sh::T;
    static constexpr int kRaw = Sh::tokens * Sh::channels;
    float bc[Sh::buffers][Sh::rows * Sh::bc_row];
    float steps[Sh::buffers][Sh::rows / Sh::unroll * Sh::step_block];
    float sums[Sh::buffers][Sh::tokens * Sh::sum_row];  // what each lane adds, for its K channels
    T raw_dt[Sh::buffers][kRaw], raw_x[Sh::raw_buffers][kRaw], raw_z[Sh::raw_buffers][kRaw];
    T raw_bc[Sh::buffers][Sh::tokens * Sh::bc_row];  // B, then C
};

// Copies that go on while the thread computes.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    const unsigned address = unsigned(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(kBytes)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Rows of one input as the helping threads copy them, kColumns elements into rows of kPitch: a thread takes
// one piece of every so many rows.
template <class Sh, int kColumns, int kPitch>
struct Source {
    using T = typename Sh::T;
    static constexpr int kRowBytes = kColumns * int(sizeof(T));
    static constexpr int kPieceBytes = kRowBytes % 16 == 0 ? 16 : kRowBytes % 8 == 0 ? 8 : 4;
    static constexpr int kPiece = kPieceBytes / int(sizeof(T)), kPieces = kColumns / kPiece;
    static constexpr int kRowsAtOnce = Sh::helping / kPieces;
    const T* next;  // this thread's piece of the tile to copy next
    int stride;
    int row, column, inside;  // inside: how many of the piece's elements exist
    bool whole;               // they may be read at once

    __device__ __forceinline__ Source(const void* base, std::int64_t row_stride, std::int64_t first_row,
                                      std::int64_t c0, std::int64_t columns, int thread, bool aligned)
        : stride(int(row_stride)),
          row(thread / kPieces),
          column(thread % kPieces * kPiece),
          inside(int(min(std::int64_t(kPiece), columns - c0 - column))),
          whole(aligned) {
        next = static_cast<const T*>(base) + (first_row + row) * row_stride + c0 + column;
        if (row >= kRowsAtOnce) inside = 0;
    }

    // The next `count` rows.
    __device__ __forceinline__ void copy(T* to, int count) {
        to += row * kPitch + column;
        const int rows = inside > 0 ? count - row : 0;
        if (whole) {
#pragma unroll
            for (int r = 0; r < Sh::tokens; r += kRowsAtOnce) {
                if (r < rows) copy_async<kPieceBytes>(to + r * kPitch, next + std::int64_t(r) * stride);
            }
        } else {
            copy_elements(to, next, stride, rows, inside);
        }
        next += std::int64_t(count) * stride;
    }

    __device__ __noinline__ static void copy_elements(T* to, const T* from, int stride, int rows,
                                                      int columns) {
        for (int r = 0; r < rows; r += kRowsAtOnce) {
            for (int i = 0; i < columns; ++i) to[r * kPitch + i] = from[std::int64_t(r) * stride + i];
        }
    }
};

// The pair of channels that a helping thread prepares and gates, in every so many rows.
template <class Sh>
struct OwnPair {
    int row, channel;   // the first row, and the first channel within the block's
    bool inside, both;  // whether the first, and the second, of the two channels exist

    __device__ __forceinline__ OwnPair(int thread, std::int64_t channels_left)
        : row(thread / Sh::row_pairs),
          channel(2 * (thread % Sh::row_pairs)),
          inside(channel < channels_left),
          both(channel + 1 < channels_left) {}

    __device__ __forceinline__ float2 parameters(const float* of, std::int64_t c0) const {
        if (of == nullptr) return make_float2(0.0f, 0.0f);
        return make_float2(inside ? of[c0 + channel] : 0.0f, both ? of[c0 + channel + 1] : 0.0f);
    }

    // The pair of this thread's i-th row.
    __device__ __forceinline__ float2 pair(const typename Sh::T* raw, int i) const {
        using T = typename Sh::T;
        const T* at = raw + (row + i * Sh::rows_at_once) * Sh::channels + channel;
        return widen_pair<T>(*reinterpret_cast<const Pair<T>*>(at));
    }
};

// The steps of the block's channels. Rows of the tile past `count` leave a state as it is: exp2(0 A) h + (-0)
// 0, where -0 keeps the sign of a zero.
template <class Sh>
__device__ __forceinline__ void prepare_steps(float* steps, const OwnPair<Sh>& own, float2 bias,
                                              const typename Sh::T* raw_dt, const typename Sh::T* raw_x,
                                              int count) {
#pragma unroll
    for (int i = 0; i < Sh::pairs; ++i) {
        const int row = own.row + i * Sh::rows_at_once;
        float* to = steps + row / Sh::unroll * Sh::step_block + own.channel * Sh::unroll + row % Sh::unroll;
        const float2 raw = own.pair(raw_dt, i), x = own.pair(raw_x, i);
        const bool idle = row >= count;
        const float a = idle ? 0.0f : softplus(__fadd_rn(raw.x, bias.x));
        const float b = idle ? 0.0f : softplus(__fadd_rn(raw.y, bias.y));
        to[0] = a;
        to[Sh::unroll] = b;
        to[Sh::inputs] = idle ? -0.0f : __fmul_rn(a, x.x);
        to[Sh::inputs + Sh::unroll] = idle ? -0.0f : __fmul_rn(b, x.y);
    }
}

// B and C of a tile, widened, as (B0, B1, C0, C1), (B2, B3, C2, C3) ...; rows past `count` have B = 0.
template <class Sh>
__device__ __forceinline__ void widen_bc(float* bc, const typename Sh::T* raw, int thread, int count,
                                         int d_state) {
    using T = typename Sh::T;
    constexpr int kPairs = Sh::states / 2, kItems = Sh::tokens * kPairs;
#pragma unroll
    for (int first = 0; first < kItems; first += Sh::helping) {
        const int item = first + thread, row = item / kPairs, state = 2 * (item % kPairs);
        if (kItems % Sh::helping != 0 && item >= kItems) break;
        const Pair<T>* from = reinterpret_cast<const Pair<T>*>(raw + row * Sh::bc_row + state);
        float2 B = widen_pair<T>(from[0]), C = widen_pair<T>(from[kPairs]);
        if (state >= d_state || row >= count) B.x = 0.0f, C.x = -0.0f;
        if (state + 1 >= d_state || row >= count) B.y = 0.0f, C.y = -0.0f;
        *reinterpret_cast<float4*>(bc + row * Sh::bc_row + 2 * state) = make_float4(B.x, B.y, C.x, C.y);
    }
}

// What becomes of the sums: y + D x, gated by z where there is one, to the output.
template <class Sh>
struct Finish {
    using T = typename Sh::T;
    T* out;  // of the tile at hand, this thread's first row and channel
    int stride;
    float2 D;
    bool gated, paired;

    __device__ __forceinline__ void tile(const float* sums, const OwnPair<Sh>& own, const T* raw_x,
                                         const T* raw_z, int count) {
        const float* from = sums + own.row * Sh::sum_row + own.channel / Sh::warp_channels * Sh::sum_warp +
                            own.channel % Sh::warp_channels * Sh::S;
        const int rows = own.inside ? count - own.row : 0;
        if (gated && paired) {
#pragma unroll
            for (int i = 0; i < Sh::pairs; ++i) {
                const float2 y = gate(sum(from, own, raw_x, i), own.pair(raw_z, i));
                if (i * Sh::rows_at_once < rows) store_pair<T>(row(i), y, true, true);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < Sh::pairs && i * Sh::rows_at_once < rows; ++i) {
                float2 y = sum(from, own, raw_x, i);
                if (gated) y = gate(y, own.pair(raw_z, i));
                store_pair<T>(row(i), y, own.both, paired);
            }
        }
        out += std::int64_t(count) * stride;
    }

    __device__ __forceinline__ T* row(int i) const {
        return out + std::int64_t(i * Sh::rows_at_once) * stride;
    }

    // The pair's sums over its lanes, of this thread's i-th row, and D x.
    __device__ __forceinline__ float2 sum(const float* sums, const OwnPair<Sh>& own, const T* raw_x,
                                          int i) const {
        const float* from = sums + i * Sh::rows_at_once * Sh::sum_row;
        float flat[2 * Sh::S], parts[2][Sh::S];
        if constexpr (Sh::S == 1) {
            const float2 two = *reinterpret_cast<const float2*>(from);
            flat[0] = two.x, flat[1] = two.y;
        } else {
#pragma unroll
            for (int j = 0; j < 2 * Sh::S; j += 4) {
                const float4 four = *reinterpret_cast<const float4*>(from + j);
                flat[j] = four.x, flat[j + 1] = four.y, flat[j + 2] = four.z, flat[j + 3] = four.w;
            }
        }
#pragma unroll
        for (int j = 0; j < Sh::S; ++j) {
            parts[0][j] = flat[Sh::K == 2 ? 2 * j : j];
            parts[1][j] = flat[Sh::K == 2 ? 2 * j + 1 : Sh::S + j];
        }
        const float2 x = own.pair(raw_x, i);
        return make_float2(__fmaf_rn(D.x, x.x, join_lanes(parts[0])),
                           __fmaf_rn(D.y, x.y, join_lanes(parts[1])));
    }

    __device__ __forceinline__ static float join_lanes(const float* parts) {
        constexpr int kGroup = Sh::states <= 16 ? Sh::S : 16 / Sh::N;
        float y = tree_sum<kGroup>(parts);
#pragma unroll
        for (int j = kGroup; j < Sh::S; j += kGroup) y = __fadd_rn(y, tree_sum<kGroup>(parts + j));
        return y;
    }

    __device__ __forceinline__ static float2 gate(float2 y, float2 z) {
        return make_float2(__fmul_rn(y.x, silu(z.x)), __fmul_rn(y.y, silu(z.y)));
    }
};

}  // namespace cuda
}  // namespace apcbatch
